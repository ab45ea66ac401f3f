"""Operations on operands of all labels: for each type with a rule, calls whose results depend on the rule.

Each call of `operations.tsv` is tried with all combinations of operands that TensorFlow accepts: many in one graph, since the
oracle looks at every tensor.
"""

import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tests.row_semantics import programs

raw: Any = tf.raw_ops
SPECS = (tf.TensorSpec((None, 3), tf.float64), tf.TensorSpec((None,), tf.int32))


def operands(x: tf.Tensor, labels: tf.Tensor, vector: tf.Tensor) -> dict[str, list[tf.Tensor]]:
    """Returns tensors by a letter: f(loats), i(ntegers), b(ooleans), (imag)e(s), a(xes); for a capital, one of each label."""
    count = tf.shape(x)[0]
    number, numbers = tf.cast(count, tf.float64), tf.cast(tf.round(x * 2), tf.int32)
    matrix = tf.constant([[0.5, -1, 2], [1, 0, 0.25], [-2, 1, 1]], tf.float64)
    length = tf.cast(tf.reduce_sum(vector) + 1.5, tf.int32)  # 3, but unknown
    images = x[:, None, None] * kernel(2, 2, 1)
    known = {**globals(), **locals()}
    found: dict[str, list[tf.Tensor]] = {}
    for line in pathlib.Path(__file__).with_name("operands.tsv").read_text(encoding="utf-8").splitlines():
        letter, _, expressions = line.split("\t")
        tensors = eval(f"[{expressions}]", known)
        found.setdefault(letter, []).extend(tensors)
        found.setdefault(letter.upper(), []).append(tensors[0])
    return found


def fits(*tensors: tf.Tensor) -> bool:
    """Returns whether tensors can be broadcast whatever the number of rows is: static dims do not stand for rows."""
    return has_one_meaning(*tensors) and programs.fits(*tensors)


def has_one_meaning(*tensors: tf.Tensor) -> bool:
    """Returns whether unknown dims of tensors may be equal, by the names of operands."""
    return len({re.match("(merged|long|tall)?", each.op.name)[0] for each in tensors if None in each.shape}) < 2  # type: ignore[index]


def same(*tensors: tf.Tensor) -> bool:
    """Returns whether tensors have one shape."""
    return fits(*tensors) and len({tuple(each.shape) for each in tensors}) == 1


def belong(x: tf.Tensor, indices: tf.Tensor) -> bool:
    """Returns whether there is an index for each part of x along its first axes."""
    outer = x.shape.as_list()[: indices.shape.rank]
    return outer == indices.shape.as_list() and has_one_meaning(x, indices)


def elementwise(kind: str) -> tuple[str, Callable[..., Any]]:
    """Returns the letters and the call of an operation whose operands are broadcast."""
    definition = op_def_registry.get(kind)
    types = {each.name: each.allowed_values.list.type for each in definition.attr}
    letters, agree = "", same if kind.endswith("Grad") else fits
    for argument in definition.input_arg:
        allowed = types.get(argument.type_attr) or [argument.type] * (not argument.type_attr)
        letters += "F" if not allowed or tf.float64.as_datatype_enum in allowed else "B" if 10 in allowed else "I"

    def call(*tensors: tf.Tensor) -> Any:
        named = {argument.name: each for argument, each in zip(definition.input_arg, tensors, strict=True)}
        return getattr(raw, kind)(**named) if agree(*tensors) else []

    return letters, call


def kernel(*shape: int) -> tf.Tensor:
    size = tf.TensorShape(shape).num_elements()
    return tf.reshape(tf.range(float(size), dtype=tf.float64) / 5 - 1, shape)


def gradients(call: Callable[..., Any], *operands: tf.Tensor) -> list[Any]:
    """Returns the results of a call, their gradients, and those of their squares."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(operands)
        results = tf.nest.flatten(call(*operands))
        squares = [tf.reduce_mean(each * each) for each in results]
    return [*results, *[tape.gradient(each, operands) for each in (*results, *squares)]]


def slices(x: tf.Tensor) -> list[tf.Tensor]:
    if not x.shape.rank:
        return []
    n = tf.shape(x)[0]
    found = [x[:], x[::1], x[0:], x[:n], x[0:n], x[..., None], x[None], x[:1], x[-1:], x[1:], x[::-1], x[..., 0], x[0]]
    found += [x[..., :2], x[..., None, 1:], x[: n - 1], x[: tf.shape(x)[-1]], x[n - 1 :]]
    if x.shape.rank > 1:
        m = tf.shape(x)[1]
        found += [x[:, 0], x[:, 1:], x[:, None], x[:, -1:], x[:n, :1], x[:, :m], x[:, ::2], x[:1, :], x[0, :], x[:, :n]]
        found += [x[..., :1, :], x[:, tf.newaxis, ..., 0], x[:n, :n]]
    return found


def lists(x: tf.Tensor) -> list[Any]:
    """Returns what is written into lists and read again."""
    shape, of = x.shape if None not in x.shape else -1, {"element_dtype": x.dtype}
    reserved = raw.TensorListReserve(element_shape=shape, num_elements=2, **of)
    one = raw.TensorListSetItem(input_handle=reserved, index=0, item=x)
    both = raw.TensorListSetItem(input_handle=one, index=1, item=2 * x)
    pushed = raw.TensorListPushBack(
        input_handle=raw.EmptyTensorList(element_shape=shape, max_num_elements=3, **of), tensor=x
    )
    popped, last = raw.TensorListPopBack(input_handle=pushed, element_shape=-1, **of)
    added, zeros = raw.AddN(inputs=[both, both]), raw.ZerosLike(x=both)
    resized = raw.TensorListResize(input_handle=one, size=3)
    return [
        *[raw.TensorListStack(input_handle=each, element_shape=-1, **of) for each in (both, pushed, added, zeros, one)],
        *[
            raw.TensorListGetItem(input_handle=each, index=0, element_shape=-1, **of)
            for each in (both, pushed, resized)
        ],
        *[raw.TensorListLength(input_handle=each) for each in (both, pushed, popped)],
        raw.TensorListGather(input_handle=both, indices=[1, 0], element_shape=-1, **of),
        raw.TensorListElementShape(input_handle=both, shape_type=tf.int32),
        last,
    ]


def apart(x: tf.Tensor) -> list[Any]:
    """Returns what is taken apart into a list, and put together again."""
    if not x.shape.rank:
        return []
    n, shape, of = tf.shape(x)[0], {"element_shape": -1}, {"element_dtype": x.dtype}
    made = [
        raw.TensorListFromTensor(tensor=x, **shape),
        raw.TensorListScatterV2(tensor=x, indices=tf.range(n), num_elements=n, **shape),
        raw.TensorListScatter(tensor=x, indices=tf.range(n), **shape),
        raw.TensorListReserve(element_shape=-1, num_elements=n, **of),
    ]
    whole = [raw.TensorListStack(input_handle=each, **shape, **of) for each in made[:3]]
    items = [raw.TensorListGetItem(input_handle=each, index=0, **shape, **of) for each in made[:3]]
    return [*whole, *items, *[raw.TensorListLength(input_handle=each) for each in made]]


def assigned(variable: tf.Variable, *changes: Callable[[tf.Variable], Any]) -> list[tf.Tensor]:
    """Returns a variable's value after each change; it is the same before and after."""
    value, results = variable.read_value(), []
    for change in changes:
        change(variable)
        results += [variable.read_value(), 2 * variable, variable + tf.constant([1.0, 0, 0], tf.float64)]
    variable.assign(value)
    return results


def gathered(variable: tf.Variable, value: tf.Tensor, gather: Callable[[tf.Variable], tf.Tensor]) -> list[tf.Tensor]:
    """Returns what is gathered from a variable before a value is assigned to it, and afterwards; it is set back."""
    before, old = gather(variable), variable.read_value()
    variable.assign(value)
    after = gather(variable)
    variable.assign(old)
    return [before, after]


def calls() -> dict[str, list[tuple[str, Callable[..., Any]]]]:
    """Returns for each type of operation calls, and the letters of their operands."""
    table: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
    for line in pathlib.Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines():
        kinds, letters, expression = line.split("\t")
        for kind in kinds.split():
            call = elementwise(kind) if not letters else (letters.strip("-"), _call(kind, expression))
            table.setdefault(kind, []).append(call)
    return table


def _call(kind: str, expression: str) -> Callable[..., Any]:
    code = compile(expression, kind, "eval")
    return lambda *operands: eval(
        code, {**globals(), "kind": getattr(raw, kind, None), **dict(zip("xyz", operands, strict=False))}
    )


def results(tensors: dict[str, list[tf.Tensor]], letters: str, call: Callable[..., Any]) -> Iterator[Any]:
    """Returns the results of a call on all combinations of operands that TensorFlow accepts."""
    for chosen in itertools.product(*(tensors[letter] for letter in letters)):
        try:
            yield call(*chosen)
        except (ValueError, TypeError, IndexError, tf.errors.InvalidArgumentError):
            continue


def of_calls(*chosen: tuple[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns the function of all results of calls, for `oracle.Traced`."""
    variable = tf.Variable([0.5, -1.0, 2.0], dtype=tf.float64)
    entries = tf.lookup.KeyValueTensorInitializer([0, 1, 2], [3, 1, 2], tf.int32, tf.int32)
    globals().update(VARIABLE=variable, TABLE=tf.lookup.StaticHashTable(entries, -1))

    def function(x: tf.Tensor, labels: tf.Tensor) -> Any:
        tensors = operands(x, labels, variable.read_value())
        found = tf.nest.flatten([list(results(tensors, letters, call)) for letters, call in chosen])
        return [each for each in found if isinstance(each, tf.Tensor) and each.dtype != tf.variant]

    return function
