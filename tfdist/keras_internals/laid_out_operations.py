"""Applies layouts to the tensors of operations that draw random numbers or rearrange elements."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework import tensor_util
from tensorflow.python.ops import array_ops, gen_array_ops, gen_nn_ops
from tensorflow.python.ops import gen_stateless_random_ops_v2 as random_operations

from tfdist.keras_internals.patching import Context, patched

# All functions of `tf.random.stateless_...`, `keras.random` and dropout call one of these.
_DRAWS = "random_gamma_v3 random_normal_v2 random_uniform_full_int_v2 random_uniform_int_v2 random_uniform_v2"
_DRAW_FUNCTIONS = [f"stateless_{name}" for name in (*_DRAWS.split(), "truncated_normal_v2")]
_RANK_LIMIT = 9  # greater than the rank of a model's tensors: a shorter vector of integers may be a shape
_LAID_OUT = "_tfdist_laid_out"  # attribute of operations
_TRACING_LOCK = threading.RLock()  # otherwise, a second thread would restore the first thread's replacements
_REVERSE = ((tf, "reverse"), (array_ops, "reverse"), (array_ops, "reverse_v2"))  # names of one function


def lay_out_draws(lay_out: Callable[[tf.Tensor], tf.Tensor]) -> Context:
    """Context in which `lay_out` is applied to each tensor that a traced function draws from a seed."""
    return _replace_functions(
        [(random_operations, name) for name in _DRAW_FUNCTIONS],
        lambda draw: lambda *args, **kwargs: lay_out(draw(*args, **kwargs)),
    )


def lay_out_concatenations(lay_out: Callable[[tf.Tensor, bool], tf.Tensor]) -> Context:
    """Context in which `lay_out` is applied to the inputs and results of concatenations in a traced function.

    `lay_out` takes a tensor and whether rows of the inputs are rows of the result. Axes become positive. Tensors of more than
    three dims are laid out only if rows are concatenated: in other concatenations, such as those of rotary attention heads,
    another dim is usually sharded.
    """

    def wrap_concat(concat: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def function(values: Any, axis: Any, name: str | None = None) -> tf.Tensor:
            dim, parts = _constant_value(axis), _convert_to_common_dtype(values)
            rank = next((part.shape.rank for part in parts if part.shape.rank), None)
            if rank is None or dim is None or dim.ndim or dim.dtype.kind != "i" or not -rank <= dim < rank:
                return concat(values=values, axis=axis, name=name)
            dim = int(dim) % rank
            if may_be_shapes(parts) or (rank > 3 and dim):
                return concat(values=parts, axis=dim, name=name)
            parts_laid_out = [lay_out(part, dim > 0) for part in parts]
            return lay_out(concat(values=parts_laid_out, axis=dim, name=name), dim > 0)

        return function

    return _replace_functions([(gen_array_ops, "concat_v2")], wrap_concat)


def lay_out_top_k(lay_out: Callable[[tf.Tensor], tf.Tensor]) -> Context:
    """Context in which `lay_out` is applied to the inputs and results of `tf.math.top_k` in a traced function."""

    def wrap_top_k(top_k: Callable[..., Any]) -> Callable[..., Any]:
        def function(input: Any, **options: Any) -> Any:  # tf.math.top_k passes other arguments by keyword
            results = top_k(lay_out(tf.convert_to_tensor(input)), **options)
            return type(results)(*map(lay_out, results))

        return function

    return _replace_functions([(gen_nn_ops, "top_kv2")], wrap_top_k)


def copy_transposed_inputs() -> Context:
    """Context in which a traced function transposes copies of tensors, whose layouts may differ from the originals'.

    Only tensors of at most three dims are copied: DTensor does not move an axis between inner dims of larger ones
    (tests/traps/dtensor_test.py).
    """

    def wrap_transpose(transpose: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def function(x: Any, perm: Any, name: str | None = None) -> tf.Tensor:
            tensor = tf.convert_to_tensor(x)
            is_small = tensor.shape.rank is not None and tensor.shape.rank <= 3
            return transpose(tf.identity(tensor) if is_small else tensor, perm, name)

        return function

    return _replace_functions([(gen_array_ops, "transpose"), (gen_array_ops, "conjugate_transpose")], wrap_transpose)


@contextlib.contextmanager
def lay_out_strided_slices(lay_out: Callable[[tf.Tensor, bool], tf.Tensor]) -> Iterator[None]:
    """Context in which `lay_out` is applied to the inputs and results of strided slices in a traced function.

    `lay_out` takes a tensor and whether the slice keeps the order of the rows or of a range of them. `tf.reverse`, which
    `keras.ops.flip` calls, becomes a slice with strides of -1. `tf.slice` with constant arguments becomes a slice with
    strides of 1, which needs no layout.
    """

    def wrap_slice(strided_slice: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def function(input: Any, begin: Any, end: Any, strides: Any, **options: Any) -> tf.Tensor:  # called by keyword
            steps = _constant_value(strides)
            if steps is not None and (steps == 1).all():  # like most slices
                return strided_slice(input, begin, end, strides, **options)
            tensor = tf.convert_to_tensor(input)
            if tf.get_static_value(tensor) is not None:
                return strided_slice(tensor, begin, end, strides, **options)
            keeps_rows = steps is not None and _keeps_rows(tensor.shape.rank, steps, **options)
            sliced_tensor = strided_slice(lay_out(tensor, keeps_rows), begin, end, strides, **options)
            sliced_tensor.op._set_attr(_LAID_OUT, attr_value_pb2.AttrValue(b=True))
            return lay_out(sliced_tensor, keeps_rows)

        return function

    with (
        _replace_functions([(gen_array_ops, "strided_slice")], wrap_slice),
        _replace_functions([(gen_array_ops, "_slice")], _slice_by_strides),
        _replace_functions(_REVERSE, _reverse_by_strides),
    ):
        yield


def is_laid_out(operation: tf.Operation) -> bool:
    """Returns whether a strided slice was laid out by `lay_out_strided_slices` or is a slice of a constant."""
    return _LAID_OUT in operation.node_def.attr or tf.get_static_value(operation.inputs[0]) is not None


@contextlib.contextmanager
def _replace_functions(
    functions: Sequence[tuple[Any, str]], replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Context in which functions of modules are replaced in functions that this thread traces, but not in other threads."""
    thread = threading.get_ident()

    def dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
        new_function = replacement(original)

        def function(*args: Any, **kwargs: Any) -> Any:
            is_traced = threading.get_ident() == thread and tf.inside_function()
            return (new_function if is_traced else original)(*args, **kwargs)

        return function

    with _TRACING_LOCK, patched(*((module, name, dispatch(getattr(module, name))) for module, name in functions)):
        yield


def _convert_to_common_dtype(values: Sequence[Any]) -> list[tf.Tensor]:
    """Converts values to tensors of one dtype; returns an empty list if this fails, as the operation itself will."""
    dtype = next((value.dtype for value in values if tf.is_tensor(value)), None)
    try:
        return [tf.convert_to_tensor(value, dtype) for value in values]
    except (TypeError, ValueError):
        return []


def may_be_shapes(parts: Sequence[tf.Tensor]) -> bool:
    """Returns whether tracing may need the values of tensors, which are unknown after they are laid out."""
    if not parts[0].dtype.is_integer:
        return False
    short_shapes = [(size,) for size in range(_RANK_LIMIT)]
    return all(tuple(part.shape) in short_shapes for part in parts) or all(_is_constant(part) for part in parts)


def _constant_value(value: Any) -> Any:
    return tf.get_static_value(tf.convert_to_tensor(value))


def _is_constant(tensor: tf.Tensor) -> bool:
    return not tf.is_symbolic_tensor(tensor) or tensor_util.try_evaluate_constant(tensor) is not None


def _slice_by_strides(cut: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    def function(input: Any, begin: Any, size: Any, name: str | None = None) -> tf.Tensor:
        tensor = tf.convert_to_tensor(input)
        starts, sizes = (_constant_value(argument) for argument in (begin, size))
        if not _is_within(tensor.shape, starts, sizes) or tf.get_static_value(tensor) is not None:
            return cut(tensor, begin, size, name)
        parts = [
            slice(start, None if length < 0 else start + length)
            for start, length in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]
        return tf.identity(tensor[tuple(parts)], name)

    return function


def _is_within(shape: tf.TensorShape, starts: Any, sizes: Any) -> bool:
    """Returns whether a slice is known to be within the tensor, which a strided slice does not check."""
    if shape.rank is None or starts is None or sizes is None or not starts.shape == sizes.shape == (shape.rank,):
        return False
    return all(
        (start == 0 and length == -1)
        or (dim is not None and 0 <= start <= dim and (length == -1 or 0 <= length <= dim - start))
        for dim, start, length in zip(shape, starts, sizes, strict=True)
    )


def _reverse_by_strides(reverse: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    def function(tensor: Any, axis: Any, name: str | None = None) -> tf.Tensor:
        tensor, axes = tf.convert_to_tensor(tensor), _constant_value(axis)
        rank = tensor.shape.rank
        if rank is None or axes is None or axes.ndim != 1 or not all(-rank <= dim < rank for dim in axes):
            return reverse(tensor, axis, name)
        dims = {int(dim) % rank for dim in axes}
        if len(dims) < len(axes):
            return reverse(tensor, axis, name)
        parts = tuple(slice(None, None, -1 if dim in dims else 1) for dim in range(rank))
        return tf.identity(tensor[parts] if dims else tensor, name)

    return function


def _keeps_rows(
    rank: int | None, steps: Any, ellipsis_mask: int = 0, new_axis_mask: int = 0, shrink_axis_mask: int = 0, **_: Any
) -> bool:
    """Returns whether a slice keeps the first dim first and its rows in order; False if unknown."""
    named_axes = len(steps) - 1 - new_axis_mask.bit_count()
    is_empty = ellipsis_mask & 1 and (rank is None or rank <= named_axes)
    return bool(steps[0] == 1) and not (new_axis_mask | shrink_axis_mask) & 1 and not is_empty
