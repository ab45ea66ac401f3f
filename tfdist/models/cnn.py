"""A small convolutional classifier with batch normalization."""

from collections.abc import Sequence

import keras

from tfdist.models import arguments
from tfdist.models.batch_norm import layer_class


def cnn(
    *, input_shape: Sequence[int], classes: int, filters: int | Sequence[int] = (32, 64), batch_norm: str = "local"
) -> keras.Model:
    """For each number of filters: 3x3 convolution, batch normalization, ReLU and 2x2 max pooling; then the logits.

    Args:
      input_shape: (height, width, channels) of one example.
      classes: number of logits, at least 1.
      filters: output channels of each convolution. Each block halves height and width, rounded up.
      batch_norm: "local" or "synchronized".

    Returns:
      A model of (batch, height, width, channels) to (batch, classes).

    Raises:
      InputError: an argument is out of range.
    """
    normalization = layer_class(batch_norm)
    channels_last = {"data_format": "channels_last"}
    inputs = keras.Input(arguments.shape("cnn", input_shape, ("height", "width", "channels")), name="inputs")
    x = inputs
    for i, channels in enumerate(arguments.sizes("cnn", "filters", filters)):
        # The normalization would subtract a bias again, whose gradient would be rounding noise.
        x = keras.layers.Conv2D(channels, 3, padding="same", use_bias=False, name=f"conv_{i}", **channels_last)(x)
        # Moving statistics adapt within tens of steps: Keras's 0.99 needs more steps than a small data set provides.
        x = normalization(momentum=0.9, name=f"norm_{i}")(x)
        x = keras.layers.ReLU(name=f"relu_{i}")(x)
        x = keras.layers.MaxPooling2D(2, padding="same", name=f"pool_{i}", **channels_last)(x)
    x = keras.layers.Flatten(name="flatten", **channels_last)(x)
    logits = keras.layers.Dense(arguments.positive("cnn", "classes", classes), name="logits")(x)
    return keras.Model(inputs, logits, name="cnn")
