"""Keras's ResNet-50, with logits."""

from collections.abc import Sequence

import keras

from tfdist.errors import InputError
from tfdist.models import arguments
from tfdist.models.batch_norm import with_batch_norm


def resnet50(*, input_shape: Sequence[int], classes: int, batch_norm: str = "local") -> keras.Model:
    """`keras.applications.ResNet50` without pretrained weights (He et al., "Deep residual learning", 2015).

    Args:
      input_shape: (height, width, channels) of one example; height and width at least 32.
      classes: number of logits, at least 1.
      batch_norm: "local" or "synchronized".

    Returns:
      A model of (batch, height, width, channels) to (batch, classes).

    Raises:
      InputError: an argument is out of range.
    """
    height, width, channels = arguments.shape("resnet50", input_shape, ("height", "width", "channels"))
    if min(height, width) < 32:
        raise InputError(f"resnet50: height and width must be at least 32. Received: {input_shape!r}. Use --model=cnn.")
    model = keras.applications.ResNet50(
        weights=None,
        input_shape=(height, width, channels),
        classes=arguments.positive("resnet50", "classes", classes),
        classifier_activation=None,
    )
    return with_batch_norm(model, batch_norm)
