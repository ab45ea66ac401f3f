"""A custom model and dataset, given by the names of two functions.

    cd examples && tfdist train --model="own_model_and_data:network(width=32)" \
        --dataset=own_model_and_data:tumors --batch_size=32 --epochs=20

The module is searched for in the current directory and PYTHONPATH. Arguments in parentheses are passed to the function.
"""

import keras
import numpy as np
from sklearn.datasets import load_breast_cancer


def network(input_shape, classes, width: int = 16, dropout: float = 0.1):
    """Returns the model; `input_shape` and `classes` are passed by tfdist, because the function has these parameters."""
    return keras.Sequential(
        [
            keras.layers.Input(input_shape),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(classes),
        ]
    )


def tumors(test_size: int = 114):
    """Returns (x, y) for training and (x, y) for testing. Each may also be a `tf.data.Dataset` of unbatched examples."""
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    train = x[test_size:]
    x = ((x - train.mean(axis=0)) / train.std(axis=0)).astype("float32")
    return (x[test_size:], y[test_size:]), (x[:test_size], y[:test_size])
