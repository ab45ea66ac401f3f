"""`load_model`: loads a saved model and makes its optimizer distributed again."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist.errors import InputError
from tfdist.horovod.compression import Compression
from tfdist.horovod.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type[keras.Optimizer]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Loads a model with `keras.models.load_model` and wraps its optimizer, with its state, in `DistributedOptimizer`.

    Args:
      filepath: a model saved with a distributed or an ordinary optimizer.
      custom_optimizers: classes of optimizers that Keras does not know.
      custom_objects: other classes and functions that Keras does not know, by name.
      compression: compression of the distributed optimizer, whose state is not saved.
      legacy_opts: False; Keras 3 has no legacy optimizers.
    """
    if legacy_opts:
        raise InputError("Keras 3 has no legacy optimizers. Received: legacy_opts=True. Leave it out.")
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
