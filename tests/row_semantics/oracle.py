"""Labels against numbers: a function runs on all rows of a batch and on uneven parts of them, and every tensor is compared.

All tensors at the top level of its graph are fetched, with the state of its variables before and after.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.row_semantics.function_labels import argument_values
from tfdist.row_semantics.interpreter import Interpreter
from tfdist.row_semantics.labels import AllRows, Label, Replicated, ReplicatedPlusSum, Rows
from tfdist.row_semantics.sizes import Size
from tfdist.row_semantics.values import Value

PARTS = ((1, 2, 4), (1, 1), (1, 3, 5), (3,), (2, 1, 5, 4))
_REDUCTIONS = {"max": np.maximum, "min": np.minimum, "all": np.logical_and, "any": np.logical_or}


class Result(NamedTuple):
    """What a run computes: its tensors, and its variables before and after."""

    rows: int
    tensors: list[np.ndarray]
    before: list[np.ndarray]
    after: list[np.ndarray]


class Traced:
    """A function, traced so that it returns every tensor of its graph, and labelled.

    Attributes:
      values: what is said of each tensor.
      results: what is said of each tensor that the function returns.
      assigned: what is said of each variable of `variables` after a run; None if it is not assigned.
      without_rule: types of operations without a rule.
    """

    def __init__(self, function: Callable[..., Any], *specs: tf.TensorSpec):
        self.tensors: list[tf.Tensor] = []

        def returns_everything(*arguments: tf.Tensor) -> Any:
            results = [tf.convert_to_tensor(each) for each in tf.nest.flatten(function(*arguments))]
            operations = tf.compat.v1.get_default_graph().get_operations()
            self.tensors = [each for operation in operations for each in operation.outputs if _is_fetched(each)]
            return [*results, *self.tensors]

        self.specs = specs
        self.function = tf.function(returns_everything, autograph=False).get_concrete_function(*specs)
        graph = self.function.graph
        self.variables = list(graph.variables)
        interpreter = Interpreter()
        self.keys = [id(variable.handle) for variable in self.variables]
        values = interpreter.run(graph, argument_values(self.function))
        self.results, self.values = values[: -len(self.tensors)], values[-len(self.tensors) :]
        self.assigned = [interpreter.variables.get(key) for key in self.keys]
        self.without_rule = interpreter.without_rule
        self.inputs = [[each.ref() for each in tensor.op.inputs] for tensor in self.tensors]
        self.is_random = _random(self.tensors)
        # What sums are added to, by the tensor: the same in all runs.
        self.bases: dict[int, np.ndarray] = {}

    def run(self, arguments: Sequence[np.ndarray]) -> Result:
        """Runs the function, and sets its variables back to what they were before."""
        before = [variable.numpy() for variable in self.variables]
        try:
            flat = self.function(*map(tf.constant, arguments))
            after = [variable.numpy() for variable in self.variables]
        finally:
            for variable, value in zip(self.variables, before, strict=True):
                variable.assign(value)
        tensors = [each.numpy() for each in flat[-len(self.tensors) :]]
        return Result(len(arguments[0]), tensors, before, after)

    def contradictions(self, arguments: Sequence[np.ndarray], parts: Sequence[int] = PARTS[0]) -> list[str]:
        """Returns what is said of the function's tensors and variables and is not so; arguments have rows, or no rank."""
        whole = self.run(arguments)
        ends = np.cumsum(parts)
        assert ends[-1] == whole.rows
        replicas = [
            self.run([each[end - count : end] if each.ndim else each for each in arguments])
            for end, count in zip(ends, parts, strict=True)
        ]
        return list(self._compare(whole, replicas))

    def _compare(self, whole: Result, replicas: Sequence[Result]) -> Iterator[str]:
        bound: dict[str, int] = {}
        scales: dict[Any, float] = {}
        initial = dict(zip(self.keys, whole.before, strict=True))
        for number, (tensor, value) in enumerate(zip(self.tensors, self.values, strict=True)):
            results = [result.tensors[number] for result in (whole, *replicas)]
            parts = [result.rows for result in (whole, *replicas)]
            scale = max(map(_scale, results))
            scales[tensor.ref()] = max([scale, *(scales.get(each, 1.0) for each in self.inputs[number])])
            if tensor.op.name in self.is_random or (_is_unbroadcast(tensor.op) and 1 in parts):
                continue
            tolerance = scales[tensor.ref()] * (1e-9 if tensor.dtype in (tf.float64, tf.complex128) else 1e-4)
            checked = Checked(value, results, parts, tolerance, initial)
            if isinstance(value.label, ReplicatedPlusSum) and np.isfinite(base := checked.base()).all():
                if not _close(self.bases.setdefault(number, base), base, 100 * tolerance):
                    yield f"{tensor.op.type} {tensor.name} {checked}: a sum is added to {base} and {self.bases[number]}"
            for complaint in checked.complaints(bound):
                yield f"{tensor.op.type} {tensor.name} {checked}: {complaint}"
        for number, (variable, value) in enumerate(zip(self.variables, self.assigned, strict=True)):
            results = [result.after[number] for result in (whole, *replicas)]
            value = value or Value(Replicated(), variable=self.keys[number])
            tolerance = max(map(_scale, results)) * (1e-8 if variable.dtype == tf.float64 else 1e-3)
            checked = Checked(value, results, [whole.rows, *(each.rows for each in replicas)], tolerance, initial)
            for complaint in checked.complaints(bound):
                yield f"{variable.name} {checked}: {complaint}"


def _is_fetched(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_numpy_compatible and tensor.dtype not in (tf.resource, tf.variant, tf.string)


def _is_unbroadcast(operation: tf.Operation) -> bool:
    """Returns whether a gradient is summed over broadcast axes: over one row, too, before it is reshaped to have it again."""
    return operation.type == "BroadcastGradientArgs" or (
        operation.type == "Sum" and operation.inputs[1].op.type == "BroadcastGradientArgs"
    )


def _random(tensors: Sequence[tf.Tensor]) -> set[str]:
    """Returns the names of operations that depend on random numbers, which are compared by law only."""
    names: set[str] = set()
    for tensor in tensors:
        operation = tensor.op
        kinds = [operation.type, *(node.op for node in _nodes(operation))]
        is_random = any("Random" in kind or "Multinomial" in kind or kind.startswith("Stateful") for kind in kinds)
        if is_random and "Key" not in operation.type or any(each.op.name in names for each in operation.inputs):
            names.add(operation.name)
    return names


def _nodes(operation: tf.Operation) -> Iterator[Any]:
    for attribute in operation.node_def.attr.values():
        if attribute.func.name:
            function = operation.graph._get_function(attribute.func.name)
            yield from (
                function.graph.as_graph_def().node if hasattr(function, "graph") else function.definition.node_def
            )


def _scale(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind in "fc" else np.abs(array.astype(float))
    return float(max(1.0, finite.max(initial=0)))


@dataclasses.dataclass
class Checked:
    """What is said of a tensor, and its numbers: those of all rows first, then those of the replicas."""

    value: Value
    results: Sequence[np.ndarray]
    rows: Sequence[int]
    tolerance: float
    initial: dict[object, np.ndarray]

    def __str__(self) -> str:
        return f"[{self.value.label}]"

    def complaints(self, bound: dict[str, int]) -> Iterator[str]:
        """Returns what is wrong; `bound` are the known values of symbols, and learns others."""
        for rows, result in zip(self.rows, self.results, strict=True):
            yield from _wrong_dims(self.value, result, {**bound, "": rows}, bound)
        if self.value.variable is not None and self.value.variable in self.initial:
            for result in self.results:
                if not _close(result, self.initial[self.value.variable], self.tolerance):
                    yield "is not the variable as it was"
        if isinstance(self.value.label, AllRows):
            return
        whole, *replicas = [each.astype(float) if each.dtype.kind not in "cb" else each for each in self.results]
        if not self._is_as_labelled(self.value.label, whole, replicas):
            yield f"whole {whole.tolist()}, parts {[each.tolist() for each in replicas]} of {self.rows[1:]} rows"

    def _is_as_labelled(self, label: Label, whole: np.ndarray, replicas: Sequence[np.ndarray]) -> bool:
        if isinstance(label, Replicated) and label.power is None or isinstance(label, Rows) and label.power is None:
            if any(each.any() for each in (whole, *replicas)):
                return False
        if isinstance(label, ReplicatedPlusSum):
            return self._is_increased(label, whole, replicas)
        whole, *replicas = [
            _divided(*each, label.power or 0) for each in zip((whole, *replicas), self.rows, strict=True)
        ]
        if isinstance(label, Replicated):
            return all(_close(each, whole, self.tolerance) for each in replicas)
        if isinstance(label, Rows):
            if any(each.ndim <= label.axis for each in replicas):
                return False
            return _close(_joined(replicas, label.axis), whole, self.tolerance)
        if any(each.shape != whole.shape for each in replicas):
            return False
        if label.reduction == "sum":
            return _close(sum(replicas), whole, self.tolerance, is_sum=True)
        return _close(_REDUCTIONS[label.reduction].reduce(replicas), whole, self.tolerance)

    def base(self) -> np.ndarray:
        """Solves t - u = COUNT^p sum (t_r - u) / COUNT_r^p for the replicated u; NaN if it cannot."""
        label, (whole, *replicas) = self.value.label, [each.astype(float) for each in self.results]
        factors = [(self.rows[0] / rows) ** label.power for rows in self.rows[1:]]
        if any(each.shape != whole.shape for each in replicas) or len(factors) == 1 or label.power == -1:
            return np.array(np.nan)
        total = sum(factor * each for factor, each in zip(factors, replicas, strict=True))
        return (whole - total) / (1 - sum(factors))

    def _is_increased(self, label: ReplicatedPlusSum, whole: np.ndarray, replicas: Sequence[np.ndarray]) -> bool:
        if any(each.shape != whole.shape for each in replicas):
            return False
        factors = [(self.rows[0] / rows) ** label.power for rows in self.rows[1:]]
        base = self.initial.get(label.variable) if label.variable is not None else None
        if base is None:
            return True
        total = sum(factor * (each - base) for factor, each in zip(factors, replicas, strict=True))
        return _close(base + total, whole, self.tolerance, is_sum=True)


def _divided(array: np.ndarray, rows: int, power: int) -> np.ndarray:
    return array / float(rows) ** power if power else array


def _joined(replicas: Sequence[np.ndarray], axis: int) -> np.ndarray:
    try:
        return np.concatenate(replicas, axis)
    except ValueError:
        return np.array(None)


def _close(left: np.ndarray, right: np.ndarray, tolerance: float, *, is_sum: bool = False) -> bool:
    if left.shape != right.shape or left.dtype == object:
        return False
    if np.array_equal(left, right):
        return True
    with np.errstate(all="ignore"):
        equal = (np.abs(left.astype(complex) - right.astype(complex)) <= tolerance) | (left == right)
        # A sum over replicas may overflow earlier than one over all rows, or later.
        both = ~np.isfinite(left) & ~np.isfinite(right) if is_sum else np.isnan(left) & np.isnan(right)
    return bool(np.all(equal | both))


def _wrong_dims(value: Value, result: np.ndarray, known: dict[str, int], bound: dict[str, int]) -> Iterator[str]:
    """Compares what is said of dims and numbers; an unknown symbol gets the value that makes it right, if there is one."""
    said: list[tuple[Size | None, Any]] = []
    if value.dims is not None:
        if len(value.dims) != result.ndim:
            yield f"rank {result.ndim} instead of {len(value.dims)}"
            return
        said += zip(value.dims, result.shape, strict=True)
    if value.numbers is not None:
        if value.numbers.shape != result.shape:
            yield f"numbers of shape {value.numbers.shape} instead of {result.shape}"
            return
        said += zip(value.numbers.flat, result.ravel().tolist(), strict=True)
    for size, number in said:
        if size is None:
            continue
        expected = float(size.coefficient)
        for symbol, power in size.powers:
            if symbol not in known and power == 1 and len(size.powers) == 1 and size.coefficient == 1:
                known[symbol] = bound[symbol] = number
            if symbol not in known:
                return
            expected *= float(known[symbol]) ** power
        if abs(expected - number) > 1e-6 * abs(expected):
            yield f"{size} is {number} for {known['']} rows"


KINDS = ("normal", "ties", "zeros", "rare", "positive", "negative")


def draw(spec: tf.TensorSpec, rows: int, kind: str, seed: int, largest: int = 3) -> np.ndarray:
    """Returns data of a kind for an argument: its unknown dims but the first are 3."""
    generator = np.random.default_rng([seed, rows, *map(ord, kind)])
    shape = [rows, *(length or 3 for length in spec.shape[1:])] if spec.shape.rank else []
    dtype = spec.dtype.as_numpy_dtype
    if spec.dtype.is_bool:
        array: Any = generator.random(shape) < {"zeros": 0.0, "rare": 0.1, "positive": 1.0}.get(kind, 0.5)
    elif spec.dtype.is_integer:
        array = generator.integers(0, largest, shape)
    else:
        array = generator.standard_normal(shape)
        if kind == "ties":
            array = np.round(array * 2) / 2
    array = np.array(array)
    if kind in ("positive", "negative") and not spec.dtype.is_integer and not spec.dtype.is_bool:
        array = abs(array) if kind == "positive" else -abs(array)
    if kind == "zeros" or (kind == "rare" and shape):
        kept = slice(rows - 1, rows) if kind == "rare" and seed % 2 else slice(0, int(kind == "rare"))
        others = np.ones(shape, bool)
        if shape:
            others[kept] = False
        array[others] = 0
    return array.astype(dtype)
