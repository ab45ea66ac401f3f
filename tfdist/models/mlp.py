"""A multilayer perceptron."""

from collections.abc import Sequence

import keras

from tfdist.models import arguments


def mlp(*, input_shape: Sequence[int], classes: int, hidden: int | Sequence[int] = (256, 128)) -> keras.Model:
    """Dense layers with ReLU between them, on the flattened example.

    Args:
      input_shape: shape of one example, of any rank.
      classes: number of logits, at least 1.
      hidden: width of each hidden layer; empty for a linear model.

    Returns:
      A model of (batch, *input_shape) to (batch, classes).

    Raises:
      InputError: an argument is out of range.
    """
    inputs = keras.Input(arguments.shape("mlp", input_shape), name="inputs")
    x = keras.layers.Flatten(name="flatten")(inputs)
    for i, width in enumerate(arguments.sizes("mlp", "hidden", hidden)):
        x = keras.layers.Dense(width, activation="relu", name=f"hidden_{i}")(x)
    logits = keras.layers.Dense(arguments.positive("mlp", "classes", classes), name="logits")(x)
    return keras.Model(inputs, logits, name="mlp")
