"""Parts of Keras whose rows are declared, because what Keras documents cannot be derived from their operations.

Batch normalization computes statistics of the rows that it is given: of a replica or, if it is synchronized, of all replicas.
Either is documented. The hinge losses convert labels 0 and 1 to -1 and 1 if no label is another number; rows whose labels are
all 1 are converted to the same. CTC and dilated convolutions are computed row by row, by operations that have no rule.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.row_semantics.declarations import row_wise


def normalizations(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns the batch normalizations of Keras and of this library."""
    layers = [layer for layer in keras_internals.layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]
    return [layer for layer in layers if not keras_internals.is_user_defined(layer)]


@contextlib.contextmanager
def declared(model: keras.Model, *, synchronized: bool = True) -> Iterator[None]:
    """Context in which these parts declare that they compute each row by itself.

    Args:
      model: built model.
      synchronized: whether synchronized batch normalizations are among them, which communicate.
    """
    layers = [layer for layer in normalizations(model) if synchronized or not layer.synchronized]
    wrappers: dict[str, Callable[..., Any]] = {
        "convert_binary_labels_to_hinge": row_wise,
        "ctc_loss": _ctc,
        "conv": _dilated,
        "depthwise_conv": _dilated,
    }
    for layer in layers:
        layer.__dict__["call"] = _call(layer.call)  # bypasses Keras's tracking
    try:
        with keras_internals.functions_wrapped(wrappers):
            yield
    finally:
        for layer in layers:
            layer.__dict__.pop("call")


def _call(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def declared_call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return row_wise(lambda x: call(x, *args, **kwargs))(inputs)

    return declared_call


def _ctc(ctc_loss: Callable[..., Any]) -> Callable[..., Any]:
    def declared_loss(target: Any, output: Any, target_length: Any, output_length: Any, mask_index: int = 0) -> Any:
        declared = row_wise(functools.partial(ctc_loss, mask_index=mask_index))
        return declared(target, output, target_length, output_length)

    return declared_loss


def _dilated(convolution: Callable[..., Any]) -> Callable[..., Any]:
    """Dilated positions are moved to the axis of rows, and back."""

    def declared_convolution(
        inputs: Any,
        kernel: Any,
        strides: Any = 1,
        padding: str = "valid",
        data_format: Any = None,
        dilation_rate: Any = 1,
    ) -> Any:
        def convolved(x: Any, weights: Any) -> Any:
            return convolution(x, weights, strides, padding, data_format, dilation_rate)

        is_dilated = any(rate != 1 for rate in keras.tree.flatten(dilation_rate))
        return (row_wise(convolved) if is_dilated else convolved)(inputs, tf.convert_to_tensor(kernel))

    return declared_convolution
