"""Imports TensorFlow and Keras, and prints TensorFlow's GPUs as one line of JSON."""

import json

import keras  # noqa: F401 - checks that it can be imported
import tensorflow as tf

if __name__ == "__main__":
    gpus = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus]
    print(json.dumps({"gpus": names, "is_built_with_cuda": tf.test.is_built_with_cuda()}))
