"""Recurrent networks: encoder states as a decoder's initial state, both directions, and a custom cell."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(812)

# An encoder's state is the initial state of a decoder.
encoder_vocab = 50
decoder_vocab = 60

encoder_input = layers.Input(shape=(None,), name="encoder")
encoder_embedded = layers.Embedding(input_dim=encoder_vocab, output_dim=8)(encoder_input)

# Return states in addition to output
output, state_h, state_c = layers.LSTM(8, return_state=True, name="encoder_lstm")(encoder_embedded)
encoder_state = [state_h, state_c]

decoder_input = layers.Input(shape=(None,), name="decoder")
decoder_embedded = layers.Embedding(input_dim=decoder_vocab, output_dim=8)(decoder_input)

# Pass the 2 states to a new LSTM layer, as initial state
decoder_output = layers.LSTM(8, name="decoder_lstm")(decoder_embedded, initial_state=encoder_state)
output = layers.Dense(10)(decoder_output)

model = keras.Model([encoder_input, decoder_input], output)
model.summary()
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer="sgd", metrics=["accuracy"])
source = np.random.randint(encoder_vocab, size=(120, 12))
target = np.random.randint(decoder_vocab, size=(120, 9))
labels = np.random.randint(10, size=(120,))
history = model.fit([source, target], labels, batch_size=32, epochs=2)
print("encoder and decoder:", history.history["loss"])

# Bidirectional layers, then a GRU
model = keras.Sequential(
    [
        keras.Input(shape=(12, 6)),
        layers.Bidirectional(layers.LSTM(6, return_sequences=True)),
        layers.GRU(4),
        layers.Dropout(0.1),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile(loss="sparse_categorical_crossentropy", optimizer="adam")
sequences = np.random.normal(size=(120, 12, 6)).astype("float32")
history = model.fit(sequences, labels, batch_size=16, epochs=2)


# A cell with two states, for the two features of each time step
class NestedCell(keras.layers.Layer):
    def __init__(self, unit_1, unit_2, **kwargs):
        super().__init__(**kwargs)
        self.unit_1 = unit_1
        self.unit_2 = unit_2
        self.state_size = [unit_1, unit_2]
        self.output_size = unit_1 + unit_2

    def build(self, input_shape):
        self.half = input_shape[-1] // 2
        self.kernel_1 = self.add_weight(shape=(self.half, self.unit_1), initializer="uniform", name="kernel_1")
        self.kernel_2 = self.add_weight(
            shape=(input_shape[-1] - self.half, self.unit_2), initializer="uniform", name="kernel_2"
        )

    def call(self, inputs, states):
        input_1, input_2 = inputs[:, : self.half], inputs[:, self.half :]
        s1, s2 = states
        state_1 = 0.5 * s1 + ops.matmul(input_1, self.kernel_1)
        state_2 = 0.5 * s2 + ops.matmul(input_2, self.kernel_2)
        return ops.concatenate([state_1, state_2], axis=-1), [state_1, state_2]

    def get_config(self):
        return {**super().get_config(), "unit_1": self.unit_1, "unit_2": self.unit_2}


inputs = {"feature_1": keras.Input((10, 4), name="feature_1"), "feature_2": keras.Input((10, 4), name="feature_2")}
merged = layers.Concatenate()([inputs["feature_1"], inputs["feature_2"]])
sequence_out, *last_states = layers.RNN(NestedCell(6, 5), return_sequences=True, return_state=True)(merged)
outputs = {"each_step": layers.Dense(1)(sequence_out), "last": layers.Dense(2)(layers.Concatenate()(last_states))}
model = keras.Model(inputs, outputs)
model.compile(optimizer="adam", loss={"each_step": "mse", "last": "mae"})

features = {name: np.random.random((100, 10, 4)) for name in ("feature_1", "feature_2")}
targets = {"each_step": np.random.random((100, 10, 1)), "last": np.random.random((100, 2))}
history = model.fit(features, targets, batch_size=24, epochs=3)
print({name: value.shape for name, value in model.predict(features, verbose=0).items()})
