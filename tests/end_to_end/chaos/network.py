"""A small model with all kinds of state that a run has to restore: moving statistics, random layers, slots, error feedback."""

import keras


def network(*, input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """Returns two dense layers, with batch normalization and dropout after the first."""
    inputs = keras.Input(input_shape, name="inputs")
    x = keras.layers.Flatten(name="flatten")(inputs)
    x = keras.layers.Dense(128, use_bias=False, name="hidden")(x)
    x = keras.layers.BatchNormalization(momentum=0.9, name="norm")(x)
    x = keras.layers.Dropout(0.2, name="dropout")(keras.layers.ReLU(name="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x), name="network")
