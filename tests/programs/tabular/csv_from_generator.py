"""House prices from CSV files, read by a Python generator, by TextLineDataset and by make_csv_dataset."""

import csv
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers

COLUMNS = ["rooms", "area", "age", "distance", "price"]
NUM_FEATURES = len(COLUMNS) - 1
BATCH_SIZE = 32


def write_csv(path, count, rng):
    features = rng.normal(size=(count, NUM_FEATURES))
    prices = features @ np.array([0.5, 1.5, -0.7, -1.0]) + 0.1 * rng.normal(size=count)
    with open(path, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(COLUMNS)
        for row, price in zip(features, prices):
            # Some prices are unknown
            writer.writerow([f"{value:.5f}" for value in row] + [f"{price:.5f}" if rng.random() > 0.05 else "-99"])


def row_generator(path):
    """Yield the features and the price of each house whose price is known."""
    with open(path, newline="") as f:
        for row in csv.DictReader(f):
            price = float(row.pop("price"))
            if price == -99:
                continue
            yield np.array([float(value) for value in row.values()], dtype="float32"), np.float32(price)


def get_training_dataset(path):
    dataset = tf.data.Dataset.from_generator(
        lambda: row_generator(path),
        output_signature=(
            tf.TensorSpec(shape=(NUM_FEATURES,), dtype=tf.float32),
            tf.TensorSpec(shape=(), dtype=tf.float32),
        ),
    )
    return dataset.shuffle(100).batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)


def parse_line(line):
    fields = tf.io.decode_csv(line, record_defaults=[0.0] * len(COLUMNS))
    return tf.stack(fields[:-1]), fields[-1]


def get_validation_dataset(path):
    dataset = tf.data.TextLineDataset(path).skip(1)
    dataset = dataset.map(parse_line, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.filter(lambda features, price: price > -99.0)
    return dataset.batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)


def get_test_dataset(path):
    """Batches of columns; a price that is unknown has no weight."""
    dataset = tf.data.experimental.make_csv_dataset(path, BATCH_SIZE, label_name="price", num_epochs=1, shuffle=False)
    return dataset.map(
        lambda row, price: (tf.stack([*row.values()], axis=1), price, tf.cast(price > -99.0, tf.float32))
    )


def build_model(train_ds):
    normalizer = layers.Normalization()
    normalizer.adapt(train_ds.map(lambda features, price: features))
    model = keras.Sequential(
        [
            keras.Input(shape=(NUM_FEATURES,)),
            normalizer,
            layers.Dense(16, activation="relu"),
            layers.Dense(8, activation="relu"),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mean_squared_error", metrics=["mae"])
    return model


def main():
    keras.utils.set_random_seed(812)
    rng = np.random.default_rng(0)
    data_dir = tempfile.mkdtemp()  # processes that run this at the same time must not write one file
    write_csv(os.path.join(data_dir, "train.csv"), 200, rng)
    write_csv(os.path.join(data_dir, "valid.csv"), 75, rng)
    train_ds = get_training_dataset(os.path.join(data_dir, "train.csv"))
    valid_ds = get_validation_dataset(os.path.join(data_dir, "valid.csv"))
    print("Batches an epoch:", train_ds.cardinality().numpy())  # -2: unknown
    model = build_model(train_ds)
    model.summary()
    model.fit(train_ds, validation_data=valid_ds, epochs=3, callbacks=[keras.callbacks.CSVLogger("training_log.csv")])
    loss, mae = model.evaluate(valid_ds)
    print("The same by columns:", model.evaluate(get_test_dataset(os.path.join(data_dir, "valid.csv"))))
    print("Predicted prices:", model.predict(valid_ds)[:3].ravel())


if __name__ == "__main__":
    main()
