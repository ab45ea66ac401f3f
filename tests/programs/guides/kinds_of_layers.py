"""A tour of layers, regularizers and metrics: small networks for pictures, videos, sequences, sentences and tables."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(812)

COUNT = 110
rng = np.random.default_rng(0)
labels = rng.integers(0, 4, size=COUNT)
one_hot = keras.utils.to_categorical(labels, 4)
rows = one_hot + rng.normal(0, 0.3, size=(COUNT, 4))
series = np.sin((1 + labels[:, None]) * np.linspace(0, 3, 16))[..., None] + rng.normal(0, 0.2, size=(COUNT, 16, 1))
pictures = rng.uniform(0, 255, size=(COUNT, 9, 9, 1)) * (1 + labels[:, None, None, None]) / 4
videos = np.stack([np.roll(pictures[:, :6, :6] > 128, step, axis=1) for step in range(5)], axis=1).astype("float32")
words = (rng.integers(0, 12, size=(COUNT, 1)) + np.arange(9) * (1 + labels[:, None])) % 12


def train(name, model, x, y, callbacks=(), **compiled):
    model.compile(optimizer=keras.optimizers.Adam(0.01), **compiled)
    model.fit(x, y, batch_size=24, epochs=2, validation_split=0.2, callbacks=list(callbacks), verbose=0)
    return model


# Pictures, whose kernels are divided by their largest singular value
model = keras.Sequential(
    [
        keras.Input((9, 9, 1)),
        layers.Resizing(8, 8),
        layers.RandomCrop(8, 8),
        layers.Rescaling(1 / 255),
        layers.SpectralNormalization(layers.Conv2D(6, 3), power_iterations=2),
        layers.BatchNormalization(momentum=0.8),
        layers.Flatten(),
        layers.SpectralNormalization(layers.Dense(4)),
        layers.Softmax(),
    ]
)
train("pictures:", model, pictures, one_hot, loss="categorical_crossentropy", metrics=["accuracy"])
accuracy = keras.metrics.Accuracy()
accuracy.update_state(labels, model.predict(pictures, verbose=0).argmax(axis=-1))
print("of all pictures:", float(accuracy.result()))


# The next pictures of a video, pixel by pixel
def dice_loss(y_true, y_pred):
    """Over all pixels of the batch at once."""
    return 1 - (2 * ops.sum(y_true * y_pred) + 1) / (ops.sum(y_true) + ops.sum(y_pred) + 1)


model = keras.Sequential(
    [
        keras.Input((4, 6, 6, 1)),
        layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True),
        layers.Conv3D(1, 3, padding="same", activation="sigmoid"),
    ]
)
iou = keras.metrics.BinaryIoU(target_class_ids=[1], threshold=0.5, name="iou")
plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, min_delta=0.001)
train("videos:", model, videos[:, :-1], videos[:, 1:], [plateau], loss=dice_loss, metrics=[iou])

# Sequences and tables together: a gated dilated convolution, a code of the whole, and the table once more
sequence = keras.Input((16, 1))
table = keras.Input((4,))
x = layers.SpatialDropout1D(0.1)(layers.Conv1D(6, 3, padding="same")(sequence))
gate = layers.Conv1D(6, 2, padding="causal", dilation_rate=2, activation="sigmoid")(x)
x = layers.Multiply()([layers.Conv1D(6, 2, padding="causal", dilation_rate=2, activation="tanh")(x), gate])
x = layers.Conv1DTranspose(6, 3, strides=2)(layers.MaxPooling1D(2)(x))
x = layers.Concatenate()([layers.GlobalAveragePooling1D()(x), table])
codes = layers.UnitNormalization(name="codes")(layers.Dense(5)(x))
decoded = layers.Dense(4)(layers.LSTM(6)(layers.RepeatVector(3)(codes)))
model = keras.Model([sequence, table], [layers.Dense(4, activation="softmax")(codes), decoded])
model = train(
    "sequences:",
    model,
    (series, rows),
    [one_hot, rows],
    loss=["categorical_crossentropy", "mse"],
    metrics=[["accuracy"], [keras.metrics.CosineSimilarity()]],
)
model.fit((series, rows), [one_hot, rows], validation_data=((series[:40], rows[:40]), [one_hot[:40], rows[:40]]))
print("evaluated:", model.evaluate((series, rows), [one_hot, rows], verbose=0))
print("decoded:", model.predict((series, rows), verbose=0)[1][:2])
encoder = keras.Model(model.inputs, model.get_layer("codes").output)
print("codes:", encoder.predict((series, rows), verbose=0)[:2])


# Pairs of tables: a network with batch normalization describes both, and a contrastive loss is one number for the batch
network = keras.Sequential(
    [keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(3, activation="tanh")]
)
first, second = keras.Input((4,)), keras.Input((4,))
distance = layers.Lambda(lambda pair: ops.sqrt(ops.sum((pair[0] - pair[1]) ** 2, axis=1, keepdims=True) + 1e-7))
outputs = layers.Dense(1, activation="sigmoid")(
    layers.BatchNormalization()(distance([network(first), network(second)]))
)
same = (labels == labels[::-1]).astype("float32")[:, None]
train(
    "pairs:",
    keras.Model([first, second], outputs),
    [rows, rows[::-1].copy()],
    same,
    loss=lambda y, p: ops.mean(y * p**2 + (1 - y) * ops.maximum(1 - p, 0) ** 2),
)


# Tables: units that are rarely active, and dropout which stays on when the model predicts
class Sparsity(keras.regularizers.Regularizer):
    """Pulls the mean activity of every unit in the batch towards a target."""

    def __init__(self, target=0.1):
        self.target = target

    def __call__(self, activations):
        return ops.sum((ops.mean(activations, axis=0) - self.target) ** 2)

    def get_config(self):
        return {"target": self.target}


class MonteCarloDropout(layers.Dropout):
    def call(self, inputs):
        return super().call(inputs, training=True)


model = keras.Sequential(
    [
        layers.Dense(8, activation="sigmoid", activity_regularizer=Sparsity()),
        MonteCarloDropout(0.1),
        layers.Dense(4, activity_regularizer=keras.regularizers.L1(0.001)),
    ]
)
model.build((None, 4))
train("tables:", model, rows, rows, loss="mse")
print("several predictions:", [float(model.predict(rows, verbose=0).mean()) for _ in range(2)])


# Sentences: the embedding of the words is that of the logits as well
class LanguageModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = layers.ReversibleEmbedding(12, 8)
        self.positions = layers.Embedding(8, 8, trainable=False)
        self.attention = layers.MultiHeadAttention(2, 4)
        self.norm = layers.RMSNormalization()

    def call(self, tokens):
        x = self.embedding(tokens) + self.positions(ops.arange(8))
        x = x + self.attention(x, x, use_causal_mask=True)
        return self.embedding(self.norm(x), reverse=True)


loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train("sentences:", LanguageModel(), words[:, :-1], words[:, 1:], loss=loss)
