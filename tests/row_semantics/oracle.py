"""Labels against numbers: a function runs on all rows of a batch and on uneven parts of them, and every tensor is compared.

Its graph is interpreted operation by operation. What fails, since shapes do not fit, is left out with all that depends on it.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context, execute

from tfdist.row_semantics.interpreter import Interpreter, topological_order
from tfdist.row_semantics.rules import Call
from tfdist.row_semantics.sizes import COUNT, Size, symbol
from tfdist.row_semantics.values import AllRows, Replicated, ReplicatedPlusSum, Rows, Value, is_zero

_REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "all": np.logical_and, "any": np.logical_or}


class _Strict(Interpreter):
    """Also knows the tensors whose axis of rows has a length that TensorFlow knows, by reference."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed: set[Any] = set()

    def results(self, graph: Any, call: Call) -> Sequence[Value]:
        results = super().results(graph, call)
        for tensor, label in zip(call.operation.outputs, [value.label for value in results], strict=True):
            if isinstance(label, Rows) and tensor.shape.rank and tensor.shape[label.axis : label.axis + 1] != [None]:
                self.fixed.add(tensor.ref())
        return results


class Step(NamedTuple):
    """An operation, with what does not change between runs."""

    name: str
    kind: bytes
    inputs: list[Any]
    outputs: list[Any]
    is_of_variables: bool
    constant: tf.Tensor | None
    attributes: tuple[Any, ...]
    functions: dict[str, Any]

    @classmethod
    def of(cls, operation: tf.Operation) -> "Step":
        kind, attributes = operation.type, {}
        constant = tf.constant(tf.make_ndarray(operation.get_attr("value"))) if kind == "Const" else None
        if constant is None:
            attributes = {name: operation.get_attr(name) for name in operation.node_def.attr if name[0] != "_"}
        refs = [[each.ref() for each in tensors] for tensors in (operation.inputs, operation.outputs)]
        flat = tuple(each for name, value in attributes.items() for each in (name, _plain(value)))
        is_of_variables = any(each.dtype == tf.resource for each in operation.inputs)
        return cls(operation.name, kind.encode(), *refs, is_of_variables, constant, flat, _functions(operation))


class Evaluator:
    """Computes the tensors of graphs, operation by operation.

    Attributes:
      failed: whether an operation of a variable has failed.
    """

    def __init__(self) -> None:
        self.failed = False
        self._steps: dict[Any, list[Step]] = {}

    def steps(self, graph: Any) -> list[Step]:
        if graph not in self._steps:
            self._steps[graph] = [Step.of(operation) for operation in topological_order(graph)]
        return self._steps[graph]

    def tensors(self, graph: Any, known: dict[Any, tf.Tensor]) -> dict[Any, tf.Tensor]:
        """Returns the tensors of a graph by reference, given its placeholders."""
        for step in self.steps(graph):
            if step.outputs and step.outputs[0] in known or step.is_of_variables and self.failed:
                continue
            try:
                results = self.results(step, [known[each] for each in step.inputs])
                known.update(zip(step.outputs, results, strict=True))
            except (tf.errors.OpError, KeyError):  # it or one of its inputs has failed
                self.failed = self.failed or step.is_of_variables
        return known

    def results(self, step: Step, inputs: list[tf.Tensor]) -> Sequence[tf.Tensor]:
        functions = step.functions
        if step.constant is not None:
            return [step.constant]
        if "then_branch" in functions:
            return self._call(functions["then_branch" if inputs[0] else "else_branch"], inputs[1:])
        if "body" in functions:  # TensorFlow's own loop may wait for ever for threads that wait for it
            while self._call(functions["cond"], inputs)[0]:
                inputs = list(self._call(functions["body"], inputs))
            return inputs
        if "f" in functions and len(functions["f"].outputs) == len(step.outputs):
            return self._call(functions["f"], inputs)
        return execute.execute(step.kind, len(step.outputs), inputs, step.attributes, context.context()) or []

    def _call(self, graph: Any, inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        tensors = self.tensors(graph, dict(zip([each.ref() for each in graph.inputs], inputs, strict=True)))
        return [tensors[each.ref()] for each in graph.outputs]


class Traced:
    """A function, traced and labelled.

    Attributes:
      graph: its graph.
      operations: the operations of the graph, in the order in which they run.
      inputs: what is said of each placeholder, by its reference.
      given: the references of its arguments.
      captured: the tensors outside of the graph that it captures, by the reference of the placeholder.
      values: what is said of each tensor, by its reference.
      results: what is said of each tensor that the function returns.
      assigned: what is said of each variable of `variables` after a run; None if it is not assigned.
      random: names of the operations of which only the law of the results is known.
      unbroadcast: names of the operations of gradients that find the axes along which one row was broadcast.
    """

    def __init__(self, function: Callable[..., Any], *specs: tf.TensorSpec):
        with tf.__internal__.FuncGraph("traced").as_default() as self.graph:
            arguments = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
            results = [tf.convert_to_tensor(each) for each in tf.nest.flatten(function(*arguments))]
        self.specs, self.variables = specs, list(self.graph._watched_variables)
        self.given = [each.ref() for each in arguments]
        self.captured = {inside.ref(): outside for outside, inside in self.graph.captures}
        dims = [(COUNT, *[symbol(each.name, is_positive=True) for _ in each.shape[1:]]) for each in arguments]
        rows = [Value(Rows(0, COUNT), known) for known in dims]
        self.inputs = inputs = dict(zip(self.given, rows, strict=True))
        # A known number of rows is part of what was traced.
        inputs |= {each.ref(): Value(AllRows()) for each in arguments if each.shape[0] is not None}
        for reference, outside in self.captured.items():
            inputs[reference] = Value(Replicated(), variable=id(outside) if outside.dtype == tf.resource else None)
        interpreter = _Strict()
        self.values = interpreter.values(self.graph, inputs)
        self.results = [self.values[each.ref()] for each in results]
        self._keys = [id(variable.handle) for variable in self.variables]
        self.assigned = [interpreter.variables.get(key) for key in self._keys]
        self.operations, self._fixed = topological_order(self.graph), interpreter.fixed
        self._evaluator = Evaluator()
        self.random = _after(self.operations, _is_random, ("Shape", "ShapeN", "Size", "Rank"))
        self._seeded = {each.name for each in self.operations if each.type.startswith("Stateless")}
        self.unbroadcast = _after(self.operations, lambda each: each.type == "BroadcastGradientArgs", ("Reshape",))
        # What sums are added to, by the tensor, with a tolerance: the same in all runs.
        self._bases: dict[Any, Any] = {}

    def run(self, arguments: Sequence[np.ndarray]) -> tuple[dict[Any, np.ndarray], list[np.ndarray]]:
        """Returns the tensors that did not fail, and the variables afterwards, if none did; sets those back."""
        before = [variable.numpy() for variable in self.variables]
        given = dict(zip(self.given, map(tf.constant, arguments), strict=True))
        self._evaluator.failed = False
        tensors = self._evaluator.tensors(self.graph, self.captured | given)
        after = [variable.numpy() for variable in self.variables]
        for variable, value in zip(self.variables, before, strict=True):
            variable.assign(value)
        others = (tf.resource, tf.variant, tf.string)
        arrays = {key: tensor.numpy() for key, tensor in tensors.items() if tensor.dtype not in others}
        return arrays, [] if self._evaluator.failed else after

    def tolerances(self, tensors: Sequence[dict[Any, np.ndarray]]) -> dict[Any, float]:
        """Returns the tolerance of each tensor: of the scale and the precision of the numbers from which it is computed."""
        scales: dict[Any, float] = {}
        precisions: dict[Any, float] = {}
        for tensor in [each for operation in self.operations for each in operation.outputs]:
            key, inputs = tensor.ref(), [each.ref() for each in tensor.op.inputs]
            results = [each[key] for each in tensors if key in each]
            scales[key] = max([1.0, *map(_scale, results), *(scales.get(each, 1.0) for each in inputs)])
            precisions[key] = max([_precision(tensor.dtype), *(precisions.get(each, 0.0) for each in inputs)])
        return {key: scale * precisions[key] for key, scale in scales.items()}

    def contradictions(self, arguments: Sequence[np.ndarray], parts: Sequence[int]) -> list[str]:
        """Returns what is said of the function's tensors and variables and is not so; each argument has rows."""
        ends = np.cumsum(parts)
        slices = [slice(end - count, end) for end, count in zip(ends, parts, strict=True)]
        runs = [self.run([each[rows] for each in arguments]) for rows in (slice(None), *slices)]
        return list(self._compare([len(arguments[0]), *parts], *zip(*runs, strict=True)))

    def _compare(self, rows: Sequence[int], tensors: Sequence[Any], variables: Sequence[Any]) -> Iterator[str]:
        bound: dict[str, int] = {}  # the values of symbols
        tolerances = self.tolerances(tensors)
        initial = {key: variable.numpy() for key, variable in zip(self._keys, self.variables, strict=True)}
        for tensor in [each for operation in self.operations for each in operation.outputs]:
            key, name, value = tensor.ref(), tensor.op.name, self.values[tensor.ref()]
            results = [each[key] for each in tensors if key in each]
            # A gradient is summed over broadcast axes: over one row, too, before it is reshaped to have it again.
            if len(results) < len(rows) or (1 in (*rows, *bound.values()) and name in self.unbroadcast):
                continue
            if key in self._fixed:
                yield f"{tensor.op.type} {tensor.name} has rows along an axis of a known length"
            if name in self.random and not (name in self._seeded and isinstance(value.label, Replicated)):
                results = list(map(np.zeros_like, results))  # of rows the law only is said, and the shape
            checked = Checked(value, results, rows, tolerances[key], initial)
            if isinstance(value.label, ReplicatedPlusSum) and np.isfinite(base := checked.base()).all():
                first, tolerance = self._bases.setdefault(key, (base, checked.tolerance))
                if not close(first, base, 100 * max(tolerance, checked.tolerance)):
                    yield f"{tensor.name} [{value.label}]: a sum is added to {base} and to {first}"
            for complaint in checked.complaints(bound):
                yield f"{tensor.op.type} {tensor.name} [{value.label}]: {complaint}"
        are_known = all(variables)
        for number, (variable, assigned) in enumerate(zip(self.variables, self.assigned, strict=True)):
            results = [each[number] for each in variables if are_known]
            value = assigned or Value(Replicated(), variable=self._keys[number])
            tolerance = max(map(_scale, results), default=0) * 10 * _precision(variable.dtype)
            for complaint in Checked(value, results, rows, tolerance, initial).complaints(bound) if are_known else ():
                yield f"{variable.name} [{value.label}]: {complaint}"


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    shape = tf.TensorShape(value) if hasattr(value, "unknown_rank") else None
    return value if shape is None else None if shape.rank is None else shape.as_list()


def _after(operations: Sequence[tf.Operation], is_first: Callable[..., bool], before: Sequence[str]) -> set[str]:
    """Returns the names of operations of a kind, and of those that depend on them, before operations of other types."""
    names: set[str] = set()
    for operation in operations:
        is_next = operation.type not in before and any(each.op.name in names for each in operation.inputs)
        if is_next or is_first(operation):
            names.add(operation.name)
    return names


def _functions(operation: tf.Operation) -> dict[str, Any]:
    """Returns the graphs of the functions that an operation calls, by its attributes, as far as they are known."""
    names = {key: each.func.name for key, each in operation.node_def.attr.items() if each.func.name}
    called = {key: operation.graph._get_function(name) for key, name in names.items()}
    return {key: each.graph for key, each in called.items() if getattr(each, "graph", None) is not None}


def _is_random(operation: tf.Operation) -> bool:
    """Returns whether it has random numbers, of which labels tell the law only."""
    inner = [each for graph in _functions(operation).values() for each in graph.get_operations()]
    is_own = re.search("Random(?!.*Key)|Multinomial|TruncatedNormal", operation.type)
    return is_own is not None or any(map(_is_random, inner))


def _precision(dtype: tf.DType) -> float:
    return 1e-4 if dtype.is_floating and dtype.size == 4 else 1e-9


def _scale(array: np.ndarray) -> float:
    numbers = np.abs(array) if array.dtype.kind in "fc" else np.abs(array.astype(float))
    return float(max(1.0, numbers[np.isfinite(numbers)].max(initial=0)))


@dataclasses.dataclass
class Checked:
    """What is said of a tensor, and its numbers: those of all rows first, then those of the replicas."""

    value: Value
    results: Sequence[np.ndarray]
    rows: Sequence[int]
    tolerance: float
    initial: dict[object, np.ndarray]

    def complaints(self, bound: dict[str, int]) -> Iterator[str]:
        """Returns what is wrong; `bound` are the known values of symbols, and learns others."""
        for rows, result in zip(self.rows, self.results, strict=True):
            yield from _wrong_dims(self.value, result, {**bound, "": rows}, bound)
        variable = self.initial.get(self.value.variable)
        if variable is not None and not all(close(result, variable, self.tolerance) for result in self.results):
            yield "is not the variable as it was"
        whole, *replicas = [each.astype(float) if each.dtype.kind not in "cb" else each for each in self.results]
        if not isinstance(self.value.label, AllRows) and not self._is_as_labelled(whole, replicas):
            yield f"{whole.tolist()}, of parts {[each.tolist() for each in replicas]} of {self.rows[1:]} rows"

    def _is_as_labelled(self, whole: np.ndarray, replicas: Sequence[np.ndarray]) -> bool:
        label: Any = self.value.label
        if is_zero(label) and any(each.any() for each in (whole, *replicas)):
            return False
        same_shape = all(each.shape == whole.shape for each in replicas)
        if isinstance(label, ReplicatedPlusSum):
            base = self.initial.get(label.variable)
            if base is None or not same_shape:
                return same_shape
            total = sum(factor * (each - base) for factor, each in zip(self._factors(), replicas, strict=True))
            return close(base + total, whole, self.tolerance, is_sum=True)
        if label.power:
            whole, *replicas = [
                each / float(n) ** label.power for each, n in zip((whole, *replicas), self.rows, strict=True)
            ]
        if isinstance(label, Replicated):
            return all(close(each, whole, self.tolerance) for each in replicas)
        if isinstance(label, Rows):
            try:
                return close(np.concatenate(replicas, label.axis), whole, self.tolerance)
            except ValueError:  # their shapes do not fit
                return False
        with np.errstate(all="ignore"):
            reduced = _REDUCTIONS[label.reduction].reduce(replicas) if same_shape else np.array(None)
        return close(reduced, whole, self.tolerance, is_sum=label.reduction == "sum")

    def base(self) -> np.ndarray:
        """Solves t - u = COUNT^p sum (t_r - u) / COUNT_r^p for the replicated u; NaN if it cannot."""
        whole, *replicas = [each * np.float64(1) for each in self.results]
        factors = self._factors()
        if any(each.shape != whole.shape for each in replicas) or abs(sum(factors) - 1) < 1e-6:
            return np.array(np.nan)
        return (whole - sum(factor * each for factor, each in zip(factors, replicas, strict=True))) / (1 - sum(factors))

    def _factors(self) -> list[float]:
        return [(self.rows[0] / rows) ** self.value.label.power for rows in self.rows[1:]]


def close(left: np.ndarray, right: np.ndarray, tolerance: float, *, is_sum: bool = False) -> bool:
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
    said = []
    for array, found in ((value.dims, np.array(result.shape)), (value.numbers, result)):
        if array is not None and np.shape(array) != found.shape:
            yield f"{array} instead of {found}"
            return
        said += [] if array is None else zip(np.array(array, object).flat, found.ravel().tolist(), strict=True)
    for size, number in said:
        if isinstance(size, Size):
            for symbol, power in size.powers:
                if symbol not in known and power == 1 and len(size.powers) == 1 and size.coefficient == 1:
                    known[symbol] = bound[symbol] = number
            if all(symbol in known for symbol, _ in size.powers):
                expected = float(size.coefficient) * np.prod([float(known[symbol]) ** p for symbol, p in size.powers])
                if abs(expected - number) > 1e-6 * abs(expected):
                    yield f"{size} is {number} for {known['']} rows"


def draw(specs: Sequence[tf.TensorSpec], rows: int, kind: str, seed: int) -> list[np.ndarray]:
    """Returns data of a kind: normal, ties, zeros, rare (all but one row are 0), positive or negative."""
    arrays = []
    for number, spec in enumerate(specs):
        generator = np.random.default_rng([seed, number, rows, *map(ord, kind)])
        shape = [rows, *(length or 3 for length in spec.shape[1:])]
        if spec.dtype.is_bool:
            array: Any = generator.random(shape) < {"positive": 1.0}.get(kind, 0.5)
        elif spec.dtype.is_integer:
            array = generator.integers(0, 3, shape)
        else:
            array = generator.standard_normal(shape)
            array = {"ties": np.round(array * 2) / 2, "positive": abs(array), "negative": -abs(array)}.get(kind, array)
        if kind in ("zeros", "rare"):
            array[np.arange(rows) != ((rows - 1) * (seed % 2) if kind == "rare" else -1)] = 0
        arrays.append(array.astype(spec.dtype.as_numpy_dtype))
    return arrays
