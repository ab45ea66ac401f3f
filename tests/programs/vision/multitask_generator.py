"""Age, sex and mood from faces: three outputs with separate losses and metrics, and batches from a generator."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from tensorflow.keras import Input, Model, layers, losses, metrics, optimizers, utils

utils.set_random_seed(404)
IM = 12
N_MOODS = 3


class FaceDataGenerator:
    """Generates batches of pictures and attributes, after the well known UTKFace tutorial."""

    def __init__(self, n):
        rng = np.random.RandomState(n)
        self.age = rng.uniform(1, 90, n)
        self.sex = rng.randint(0, 2, n)
        self.mood = rng.randint(0, N_MOODS, n)
        self.camera = rng.randint(0, 4, n)
        self.labelled = (rng.uniform(size=n) < 0.8).astype("float32")  # not all moods are known
        self.images = rng.normal(0, 0.2, size=(n, IM, IM, 3))
        self.images[:, :4, :, 0] += self.age[:, None, None] / 90
        self.images[:, 4:8, :, 1] += self.sex[:, None, None]
        self.images[:, 8:, :, 2] += self.mood[:, None, None] / 2
        self.images += 0.1 * self.camera[:, None, None, None]
        self.n = n
        self.max_age = self.age.max()

    def generate(self, is_training, batch_size=16, forever=True):
        order = np.arange(self.n)
        # An endless loop, as `fit` wants it when steps_per_epoch is given
        while True:
            if is_training:
                np.random.shuffle(order)
            for start in range(0, self.n, batch_size):
                ids = order[start : start + batch_size]
                inputs = {"image": self.images[ids].astype("float32"), "camera": self.camera[ids].astype("int32")}
                targets = {
                    "age_output": (self.age[ids, None] / self.max_age).astype("float32"),
                    "sex_output": self.sex[ids, None].astype("float32"),
                    "mood_output": utils.to_categorical(self.mood[ids], N_MOODS),
                }
                weights = {
                    "age_output": np.ones(len(ids), "float32"),
                    "sex_output": np.ones(len(ids), "float32"),
                    "mood_output": self.labelled[ids],
                }
                yield inputs, targets, weights
            if not forever:
                break


def make_default_hidden_layers(inputs):
    x = layers.Conv2D(8, (3, 3), padding="same", activation="relu")(inputs)
    x = layers.BatchNormalization(axis=-1)(x)
    x = layers.MaxPooling2D(pool_size=(3, 3))(x)
    return layers.Dropout(0.1)(x)


def build_branch(x, context, units, activation, name):
    x = layers.Flatten()(x)
    x = layers.Concatenate()([x, context])
    x = layers.Dense(12, activation="relu")(x)
    return layers.Dense(units, activation=activation, name=name)(x)


image = Input((IM, IM, 3), name="image")
camera = Input((), dtype="int32", name="camera")
context = layers.Embedding(4, 3)(camera)
features = make_default_hidden_layers(image)
model = Model(
    inputs={"image": image, "camera": camera},
    outputs={
        "age_output": build_branch(features, context, 1, "linear", "age_output"),
        "sex_output": build_branch(features, context, 1, "sigmoid", "sex_output"),
        "mood_output": build_branch(features, context, N_MOODS, "softmax", "mood_output"),
    },
)
model.compile(
    optimizer=optimizers.Adam(learning_rate=3e-3),
    loss={"age_output": "mse", "sex_output": losses.BinaryCrossentropy(), "mood_output": "categorical_crossentropy"},
    loss_weights={"age_output": 4.0, "sex_output": 0.5, "mood_output": 1.5},
    metrics={
        "age_output": ["mae", metrics.RootMeanSquaredError(name="rmse"), metrics.R2Score(name="r2")],
        "sex_output": metrics.AUC(name="auc"),
        "mood_output": ["accuracy"],
    },
    weighted_metrics={"mood_output": [metrics.CategoricalAccuracy(name="known_accuracy")]},
)

batch_size = 16
train_generator = FaceDataGenerator(150)
valid_generator = FaceDataGenerator(44)
model.fit(
    train_generator.generate(is_training=True, batch_size=batch_size),
    steps_per_epoch=9,
    epochs=3,
    validation_data=valid_generator.generate(is_training=False, batch_size=22),
    validation_steps=2,
    verbose=2,
)

test_generator = FaceDataGenerator(52)
evaluated = model.evaluate(
    test_generator.generate(is_training=False, batch_size=20, forever=False), return_dict=True, verbose=0
)
predicted = model.predict({"image": test_generator.images, "camera": test_generator.camera}, batch_size=24, verbose=0)
print("test:", {name: round(float(np.mean(value)), 6) for name, value in evaluated.items()})
