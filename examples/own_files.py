"""Writes real data in the formats that `--dataset` reads: a folder of images, TFRecord, .npz and CSV.

    python examples/own_files.py files

The images are scikit-learn's handwritten digits, and the table is its wine data. docs/guides/data.md trains on these files.
"""

import csv
import pathlib
import sys

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits, load_wine

SHARDS = 3


def write_images(folder: pathlib.Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Writes PNG files, a folder per class."""
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(image).numpy())


def write_records(folder: pathlib.Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Writes TFRecord files; a record is an image, encoded as PNG, and its label."""
    for shard in range(SHARDS):
        with tf.io.TFRecordWriter(str(folder / f"digits-{shard}-of-{SHARDS}.tfrecord")) as writer:
            for image, label in zip(images[shard::SHARDS], labels[shard::SHARDS], strict=True):
                png = tf.train.BytesList(value=[tf.io.encode_png(image).numpy()])
                features = {
                    "image": tf.train.Feature(bytes_list=png),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())


def write_table(path: pathlib.Path) -> None:
    """Writes a CSV file with a header row; the last column is the label."""
    wine = load_wine()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*wine.feature_names, "cultivar"])
        writer.writerows([*row, f"cultivar_{label}"] for row, label in zip(wine.data, wine.target, strict=True))


def main(directory: str) -> None:
    """Writes all files, and prints their names."""
    folder = pathlib.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    images, labels = (digits.images * 15.9).astype(np.uint8)[..., None], digits.target
    write_images(folder / "digits", images, labels)
    write_records(folder, images, labels)
    np.savez(
        folder / "digits.npz", x_train=images[:1437], y_train=labels[:1437], x_test=images[1437:], y_test=labels[1437:]
    )
    write_table(folder / "wine.csv")
    print(*sorted(path.name for path in folder.iterdir()))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "files")
