"""The tensors of operations that draw random numbers, or take every nth element, for strategies that lay them out."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops import array_ops, gen_array_ops
from tensorflow.python.ops import gen_stateless_random_ops_v2 as random_operations

# All functions of `tf.random.stateless_...`, `keras.random` and dropout call one of these.
_DRAWS = (
    "stateless_random_gamma_v3",
    "stateless_random_normal_v2",
    "stateless_random_uniform_full_int_v2",
    "stateless_random_uniform_int_v2",
    "stateless_random_uniform_v2",
    "stateless_truncated_normal_v2",
)
_LAID_OUT = "_tfdist_laid_out"  # attribute of operations
_TRACING = threading.RLock()  # of two threads, the second would restore the replacements of the first
_REVERSE = ((tf, "reverse"), (array_ops, "reverse"), (array_ops, "reverse_v2"))  # names of one function


def draws_placed(place: Callable[[tf.Tensor], tf.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Context in which each tensor that a traced function draws from a seed is replaced by `place` of it."""
    return _replaced(
        [(random_operations, name) for name in _DRAWS],
        lambda draw: lambda *args, **kwargs: place(draw(*args, **kwargs)),
    )


@contextlib.contextmanager
def strides_placed(place: Callable[[tf.Tensor, bool], tf.Tensor]) -> Iterator[None]:
    """Context in which tensors that a traced function slices with a stride, and the slices, are replaced by `place` of them.

    `tf.reverse`, which `keras.ops.flip` calls, becomes a slice with strides of -1.

    Args:
      place: also receives whether the slice has the rows in their order, or a range of them.
    """

    def sliced(strided_slice: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def function(input: Any, begin: Any, end: Any, strides: Any, **given: Any) -> tf.Tensor:  # called by keyword
            steps = tf.get_static_value(tf.convert_to_tensor(strides))
            if steps is not None and (steps == 1).all():  # as most slices are
                return strided_slice(input, begin, end, strides, **given)
            tensor = tf.convert_to_tensor(input)
            if tf.get_static_value(tensor) is not None:
                return strided_slice(tensor, begin, end, strides, **given)
            keeps_rows = steps is not None and _keeps_rows(tensor.shape.rank, steps, **given)
            made = strided_slice(place(tensor, keeps_rows), begin, end, strides, **given)
            made.op._set_attr(_LAID_OUT, attr_value_pb2.AttrValue(b=True))
            return place(made, keeps_rows)

        return function

    with _replaced([(gen_array_ops, "strided_slice")], sliced), _replaced(_REVERSE, _by_slices):
        yield


def is_laid_out(operation: tf.Operation) -> bool:
    """Returns whether a slice with strides was made by `strides_placed`, or is of a constant."""
    return _LAID_OUT in operation.node_def.attr or tf.get_static_value(operation.inputs[0]) is not None


@contextlib.contextmanager
def _replaced(
    functions: Sequence[tuple[Any, str]], replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Context in which functions of modules are others, in what this thread traces: a thread may read data meanwhile."""
    thread = threading.get_ident()

    def either(original: Callable[..., Any]) -> Callable[..., Any]:
        other = replacement(original)

        def function(*args: Any, **kwargs: Any) -> Any:
            is_traced = threading.get_ident() == thread and tf.inside_function()
            return (other if is_traced else original)(*args, **kwargs)

        return function

    with _TRACING:
        originals = [getattr(module, name) for module, name in functions]
        try:
            for (module, name), original in zip(functions, originals, strict=True):
                setattr(module, name, either(original))
            yield
        finally:
            for (module, name), original in zip(functions, originals, strict=True):
                setattr(module, name, original)


def _by_slices(reverse: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    def function(tensor: Any, axis: Any, name: str | None = None) -> tf.Tensor:
        tensor, axes = tf.convert_to_tensor(tensor), tf.get_static_value(tf.convert_to_tensor(axis))
        rank = tensor.shape.rank
        if rank is None or axes is None or axes.ndim != 1 or not all(-rank <= each < rank for each in axes):
            return reverse(tensor, axis, name)
        dims = {int(each) % rank for each in axes}
        if len(dims) < len(axes):
            return reverse(tensor, axis, name)
        parts = tuple(slice(None, None, -1 if dim in dims else 1) for dim in range(rank))
        return tf.identity(tensor[parts] if dims else tensor, name)

    return function


def _keeps_rows(
    rank: int | None, steps: Any, ellipsis_mask: int = 0, new_axis_mask: int = 0, shrink_axis_mask: int = 0, **_: Any
) -> bool:
    """Returns whether a slice leaves the first dim first, and takes its rows in order; False if that is not known."""
    named = len(steps) - 1 - new_axis_mask.bit_count()
    is_empty = ellipsis_mask & 1 and (rank is None or rank <= named)
    return bool(steps[0] == 1) and not (new_axis_mask | shrink_axis_mask) & 1 and not is_empty
