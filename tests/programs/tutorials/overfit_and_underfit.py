"""Overfitting of models of different sizes, and what weight regularization and dropout do about it."""

import pathlib
import shutil

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, regularizers

tf.keras.utils.set_random_seed(812)
logdir = pathlib.Path("tensorboard_logs")
shutil.rmtree(logdir, ignore_errors=True)

FEATURES = 28
N_VALIDATION = 60
N_TRAIN = 180
BUFFER_SIZE = 200
BATCH_SIZE = 50
STEPS_PER_EPOCH = N_TRAIN // BATCH_SIZE

rows = np.random.normal(size=(N_VALIDATION + N_TRAIN, FEATURES + 1)).astype("float32")
rows[:, 0] = (rows[:, 1:5].sum(axis=1) + 0.5 * np.random.normal(size=len(rows))) > 0


def pack_row(row):
    label = row[:1]
    features = row[1:]
    return features, label


packed_ds = tf.data.Dataset.from_tensor_slices(rows).map(pack_row)
validate_ds = packed_ds.take(N_VALIDATION).cache()
train_ds = packed_ds.skip(N_VALIDATION).take(N_TRAIN).cache()

validate_ds = validate_ds.batch(BATCH_SIZE)
train_ds = train_ds.shuffle(BUFFER_SIZE).repeat().batch(BATCH_SIZE)

lr_schedule = tf.keras.optimizers.schedules.InverseTimeDecay(
    0.01, decay_steps=STEPS_PER_EPOCH * 10, decay_rate=1, staircase=False
)


def get_optimizer():
    return tf.keras.optimizers.Adam(lr_schedule)


def get_callbacks(name):
    return [
        tf.keras.callbacks.EarlyStopping(monitor="val_binary_crossentropy", patience=3),
        tf.keras.callbacks.TensorBoard(logdir / name),
    ]


def compile_and_fit(model, name, optimizer=None, max_epochs=4):
    if optimizer is None:
        optimizer = get_optimizer()
    model.compile(
        optimizer=optimizer,
        loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[tf.keras.metrics.BinaryCrossentropy(from_logits=True, name="binary_crossentropy"), "accuracy"],
    )
    model.summary()
    model.fit(
        train_ds,
        steps_per_epoch=STEPS_PER_EPOCH,
        epochs=max_epochs,
        validation_data=validate_ds,
        callbacks=get_callbacks(name),
        verbose=0,
    )


tiny_model = tf.keras.Sequential([layers.Dense(8, activation="elu", input_shape=(FEATURES,)), layers.Dense(1)])
compile_and_fit(tiny_model, "sizes/Tiny")

combined_model = tf.keras.Sequential(
    [
        layers.Dense(16, kernel_regularizer=regularizers.l2(0.0001), activation="elu", input_shape=(FEATURES,)),
        layers.Dropout(0.5),
        layers.Dense(16, kernel_regularizer=regularizers.l2(0.0001), activation="elu"),
        layers.Dropout(0.5),
        layers.Dense(1),
    ]
)
compile_and_fit(combined_model, "regularizers/combined")
