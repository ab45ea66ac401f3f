"""Masking and padding: embeddings with masks, layers that create, change and use masks."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(812)


class CustomEmbedding(keras.layers.Layer):
    def __init__(self, input_dim, output_dim, mask_zero=False, **kwargs):
        super().__init__(**kwargs)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.mask_zero = mask_zero

    def build(self, input_shape):
        self.embeddings = self.add_weight(shape=(self.input_dim, self.output_dim), initializer="random_normal")

    def call(self, inputs):
        inputs = ops.cast(inputs, "int32")
        return ops.take(self.embeddings, inputs, axis=0)

    def compute_mask(self, inputs, mask=None):
        if not self.mask_zero:
            return None
        return ops.not_equal(inputs, 0)


class MyActivation(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # Signal that the layer is safe for mask propagation
        self.supports_masking = True

    def call(self, inputs):
        return ops.relu(inputs)


class TemporalSoftmax(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs, mask=None):
        assert mask is not None
        broadcast_float_mask = ops.expand_dims(ops.cast(mask, inputs.dtype), -1)
        inputs_exp = ops.exp(inputs) * broadcast_float_mask
        inputs_sum = ops.sum(inputs_exp, axis=1, keepdims=True)
        return inputs_exp / inputs_sum


# A sequence-to-sequence model whose last layer uses the mask
inputs = keras.Input(shape=(None,), dtype="int32")
x = CustomEmbedding(input_dim=50, output_dim=8, mask_zero=True)(inputs)
x = MyActivation()(layers.Dense(8)(x))
outputs = TemporalSoftmax()(layers.Dense(1)(x))
model = keras.Model(inputs, outputs)
lengths = np.random.randint(3, 11, size=150)
tokens = keras.utils.pad_sequences([np.random.randint(1, 50, size=n) for n in lengths], padding="post", maxlen=10)
targets = (tokens == tokens.max(axis=1, keepdims=True)).astype("float32")[..., None]
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="binary_crossentropy")
history = model.fit(tokens, targets, epochs=3, batch_size=32)
print("temporal softmax:", history.history["loss"], model.predict(tokens[:2])[..., 0])

# Masks pass through the LSTM layers of a Sequential model.
model = keras.Sequential([layers.Embedding(input_dim=50, output_dim=8, mask_zero=True), layers.LSTM(8)])
model.add(layers.Dense(1, activation="sigmoid"))
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
labels = (lengths > 6).astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((tokens, lengths, labels)).map(lambda row, n, label: (row[:n], label))
dataset = dataset.shuffle(200).padded_batch(16, padded_shapes=((10,), ())).prefetch(2)
history = model.fit(dataset, epochs=2)
print("LSTM:", history.history["loss"], model.evaluate(tokens, labels, verbose=0))
