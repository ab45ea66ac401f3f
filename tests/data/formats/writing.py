"""Writes the files of small datasets."""

import pathlib

import numpy as np
import tensorflow as tf

COLORS = {"blue": 2, "green": 1, "red": 0}  # channel of each class


def write_image(path: pathlib.Path, channel: int, shade: int, size: tuple[int, int] = (6, 8)) -> None:
    """Writes an image with one bright channel; its value there identifies it."""
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[..., channel] = 255 - shade
    encode = {".png": tf.io.encode_png, ".jpg": lambda image: tf.io.encode_jpeg(image, quality=100)}[path.suffix]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(pixels).numpy())


def example(**values) -> bytes:
    """Returns a serialized `tf.train.Example`."""
    features = {}
    for name, value in values.items():
        if isinstance(value, bytes):
            features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        elif isinstance(value, list) and isinstance(value[0], float):
            features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=value))
        else:
            numbers = value if isinstance(value, list) else [value]
            features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=numbers))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_records(path: pathlib.Path, records) -> str:
    """Writes a TFRecord file."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return str(path)
