"""Pretraining with ModelCheckpoint, then fine-tuning from the best weights: first the head, then the upper layers."""

import os

import keras
import numpy as np
from keras import layers, models, optimizers
from keras.callbacks import CSVLogger, EarlyStopping, LearningRateScheduler, ModelCheckpoint

keras.utils.set_random_seed(500)

checkpoint_dir = "checkpoints"
os.makedirs(checkpoint_dir, exist_ok=True)


def pictures(n, shapes, seed):
    """Rings, crosses, squares, stripes..., each with noise."""
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[-5:5, -5:5]
    masks = [
        np.abs(np.hypot(yy + 0.5, xx + 0.5) - 3) < 0.9,
        (np.abs(yy) < 1.5) | (np.abs(xx) < 1.5),
        np.maximum(np.abs(yy + 0.5), np.abs(xx + 0.5)) < 3,
        yy % 3 == 0,
        xx % 3 == 0,
        (xx + yy) % 4 < 2,
    ]
    labels = rng.integers(0, len(shapes), n)
    x = np.stack([masks[shapes[label]] for label in labels]).astype("float32")
    return x[..., None] + rng.normal(0, 0.6, (n, 10, 10, 1)).astype("float32"), labels


def build_base():
    return models.Sequential(
        [
            layers.Input((10, 10, 1)),
            layers.Conv2D(6, 3, activation="relu", name="block1_conv"),
            layers.BatchNormalization(momentum=0.7, name="block1_bn"),
            layers.Conv2D(8, 3, activation="relu", name="block2_conv"),
            layers.BatchNormalization(momentum=0.7, name="block2_bn"),
            layers.GlobalAveragePooling2D(name="pool"),
        ],
        name="base",
    )


def build_classifier(num_classes, name):
    base = build_base()
    inputs = layers.Input((10, 10, 1))
    x = base(inputs)
    x = layers.Dropout(0.2)(x)
    return models.Model(inputs, layers.Dense(num_classes, activation="softmax", name="head")(x), name=name)


# ---------- pretraining on four shapes
x_train, y_train = pictures(230, [0, 1, 2, 3], seed=0)
x_val, y_val = pictures(60, [0, 1, 2, 3], seed=1)
source_model = build_classifier(4, "source")
source_model.compile(optimizers.Adam(0.3), "sparse_categorical_crossentropy", metrics=["accuracy"])
filepath = os.path.join(checkpoint_dir, "best.weights.h5")
pretraining = source_model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=4,
    validation_data=(x_val, y_val),
    callbacks=[
        ModelCheckpoint(filepath, monitor="val_loss", save_best_only=True, save_weights_only=True),
        LearningRateScheduler(lambda epoch, lr: lr * 0.8 if epoch else lr),
        CSVLogger("pretraining.csv"),
    ],
    verbose=2,
)
last = source_model.evaluate(x_val, y_val, verbose=0)
source_model.load_weights(filepath)
best = source_model.evaluate(x_val, y_val, batch_size=23, verbose=0)
print("last weights:", last, "best weights:", best)

# ---------- transfer to three others
x_new, y_new = pictures(110, [3, 4, 5], seed=2)
x_test, y_test = pictures(45, [3, 4, 5], seed=3)
target_model = build_classifier(3, "target")
target_model.get_layer("base").set_weights(source_model.get_layer("base").get_weights())

target_model.get_layer("base").trainable = False
target_model.compile(optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
print("weights to train:", len(target_model.trainable_weights))
head = target_model.fit(x_new, y_new, batch_size=24, epochs=2, validation_split=0.2, verbose=2)

# ---------- unfreeze the second block, but leave its batch normalization
base = target_model.get_layer("base")
base.trainable = True
for layer in base.layers:
    layer.trainable = layer.name.startswith("block2") and not isinstance(layer, layers.BatchNormalization)
target_model.compile(optimizers.RMSprop(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
print("weights to train:", len(target_model.trainable_weights))
target_model.save_weights(os.path.join(checkpoint_dir, "head_only.weights.h5"))
tuned = target_model.fit(
    x_new,
    y_new,
    batch_size=24,
    epochs=3,
    validation_split=0.2,
    callbacks=[
        EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True),
        ModelCheckpoint(os.path.join(checkpoint_dir, "tuned_{epoch:02d}.keras")),
    ],
    verbose=2,
)
untouched = np.allclose(base.get_layer("block1_conv").get_weights()[0], source_model.get_layer("base").get_weights()[0])

print("pretraining:", pretraining.history["loss"], pretraining.history["val_loss"])
print("head:", head.history["loss"], "tuned:", tuned.history["loss"], tuned.history["val_loss"])
print("frozen layers untouched:", untouched)
print("checkpoints:", sorted(os.listdir(checkpoint_dir)))
print("test:", target_model.evaluate(x_test, y_test, batch_size=16, return_dict=True, verbose=0))
reloaded = models.load_model(os.path.join(checkpoint_dir, "tuned_01.keras"))
print("after its first epoch:", reloaded.evaluate(x_test, y_test, return_dict=True, verbose=0))
print("predicted:", np.bincount(reloaded.predict(x_test, verbose=0).argmax(axis=1), minlength=3))
