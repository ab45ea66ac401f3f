"""A siamese network on pairs of signatures, with a custom compute_loss."""

import keras
import numpy as np
from keras import ops

keras.utils.set_random_seed(99)


class SiameseModel(keras.Model):
    """Embeds both inputs with the same tower; trained with the contrastive loss of Hadsell et al."""

    def __init__(self, tower, margin=1.0, **kwargs):
        super().__init__(**kwargs)
        self.tower = tower
        self.margin = margin
        self.positive_distance = keras.metrics.Mean(name="positive_distance")
        self.negative_distance = keras.metrics.Mean(name="negative_distance")
        self.pair_accuracy = keras.metrics.BinaryAccuracy(name="pair_accuracy", threshold=0.5)

    def call(self, inputs, training=False):
        left, right = inputs
        a = self.tower(left, training=training)
        b = self.tower(right, training=training)
        return ops.sqrt(ops.maximum(ops.sum(ops.square(a - b), axis=1), keras.config.epsilon()))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        y = ops.cast(ops.reshape(y, (-1,)), y_pred.dtype)
        positive = y * ops.square(y_pred)
        negative = (1.0 - y) * ops.square(ops.maximum(self.margin - y_pred, 0.0))

        # Positives and negatives count the same, however many there are of each in this batch.
        n_positive = ops.sum(y)
        n_negative = ops.sum(1.0 - y)
        loss = ops.sum(positive) / ops.maximum(n_positive, 1.0) + ops.sum(negative) / ops.maximum(n_negative, 1.0)
        loss = loss + sum(self.losses)

        self.positive_distance.update_state(y_pred, sample_weight=y)
        self.negative_distance.update_state(y_pred, sample_weight=1.0 - y)
        self.pair_accuracy.update_state(y, ops.exp(-y_pred))
        return loss

    def get_config(self):
        return {"margin": self.margin}


def make_signatures(writers, copies, rng):
    prototypes = rng.normal(size=(writers, 24))
    labels = np.repeat(np.arange(writers), copies)
    return prototypes[labels] + rng.normal(0, 0.5, size=(writers * copies, 24)), labels


def make_pairs(x, labels, number, rng):
    left, right, same = [], [], []
    for _ in range(number):
        i = rng.integers(len(x))
        if rng.random() < 0.4:
            j = rng.choice(np.flatnonzero(labels == labels[i]))
        else:
            j = rng.choice(np.flatnonzero(labels != labels[i]))
        left.append(x[i])
        right.append(x[j])
        same.append(int(labels[i] == labels[j]))
    return np.array(left, "float32"), np.array(right, "float32"), np.array(same, "float32")


rng = np.random.default_rng(5)
x, labels = make_signatures(12, 10, rng)
left, right, same = make_pairs(x, labels, 300, rng)
val_left, val_right, val_same = make_pairs(x, labels, 70, rng)

tower = keras.Sequential(
    [
        keras.layers.Input((24,)),
        keras.layers.Dense(32, activation="tanh", kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(8),
        keras.layers.UnitNormalization(),
    ]
)

model = SiameseModel(tower)
model.compile(optimizer=keras.optimizers.RMSprop(0.003))
history = model.fit(
    (left, right), same, batch_size=64, epochs=4, validation_data=((val_left, val_right), val_same), verbose=2
)

distances = model.predict((val_left, val_right), batch_size=25, verbose=0)
thresholds = np.linspace(0.1, 1.9, 19)
accuracies = [np.mean((distances < t) == (val_same > 0.5)) for t in thresholds]
best = int(np.argmax(accuracies))

for name, values in history.history.items():
    print(f"{name:24s}", [round(float(value), 6) for value in values])
print("evaluate:", model.evaluate((val_left, val_right), val_same, batch_size=32, verbose=0, return_dict=True))
print(f"best threshold {thresholds[best]:.1f} with accuracy {accuracies[best]:.3f}")
