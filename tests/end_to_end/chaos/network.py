"""A small model with all that a run has to bring back: moving statistics, random layers, slots, errors not yet sent."""

import keras


def network(*, input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """Two dense layers with batch normalisation and dropout behind the first."""
    inputs = keras.Input(input_shape, name="inputs")
    x = keras.layers.Flatten(name="flatten")(inputs)
    x = keras.layers.Dense(128, use_bias=False, name="hidden")(x)
    x = keras.layers.BatchNormalization(momentum=0.9, name="norm")(x)
    x = keras.layers.Dropout(0.2, name="dropout")(keras.layers.ReLU(name="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(x), name="network")
