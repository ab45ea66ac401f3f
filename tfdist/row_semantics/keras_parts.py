"""Declares parts of Keras as row-wise where this cannot be derived from their operations.

Batch normalization computes statistics of the rows of a replica or, if it is synchronized, of all replicas, as documented. The
hinge losses convert labels 0 and 1 to -1 and 1 if there are no other labels, and do not change rows whose labels are all 1. CTC
and dilated convolutions compute each row separately, with operations that have no rule.
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
    """Returns the batch normalization layers of a model whose classes are defined by Keras or tfdist."""
    layers = [layer for layer in keras_internals.layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]
    return [layer for layer in layers if not keras_internals.is_user_defined(layer)]


@contextlib.contextmanager
def declare_row_wise(model: keras.Model, *, synchronized: bool = True) -> Iterator[None]:
    """Context in which these parts of a built model are declared to compute each row separately.

    `synchronized` indicates whether to include synchronized batch normalizations, which communicate.
    """
    layers = [layer for layer in normalizations(model) if synchronized or not layer.synchronized]
    wrappers: dict[str, Callable[..., Any]] = {
        "convert_binary_labels_to_hinge": row_wise,
        "ctc_loss": _declare_ctc_loss,
        "conv": _declare_convolution,
        "depthwise_conv": _declare_convolution,
    }
    for layer in layers:
        layer.__dict__["call"] = _declare_call(layer.call)  # bypasses Keras's tracking
    try:
        with keras_internals.wrap_functions(wrappers):
            yield
    finally:
        for layer in layers:
            layer.__dict__.pop("call")


def _declare_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def row_wise_call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return row_wise(lambda x: call(x, *args, **kwargs))(inputs)

    return row_wise_call


def _declare_ctc_loss(ctc_loss: Callable[..., Any]) -> Callable[..., Any]:
    def row_wise_loss(target: Any, output: Any, target_length: Any, output_length: Any, mask_index: int = 0) -> Any:
        loss = row_wise(functools.partial(ctc_loss, mask_index=mask_index))
        return loss(target, output, target_length, output_length)

    return row_wise_loss


def _declare_convolution(convolution: Callable[..., Any]) -> Callable[..., Any]:
    def row_wise_convolution(
        inputs: Any,
        kernel: Any,
        strides: Any = 1,
        padding: str = "valid",
        data_format: Any = None,
        dilation_rate: Any = 1,
    ) -> Any:
        def convolve(x: Any, weights: Any) -> Any:
            return convolution(x, weights, strides, padding, data_format, dilation_rate)

        is_dilated = any(rate != 1 for rate in keras.tree.flatten(dilation_rate))
        return (row_wise(convolve) if is_dilated else convolve)(inputs, tf.convert_to_tensor(kernel))

    return row_wise_convolution
