"""Reduces the gradients of the distributed optimizer and the distributed tape with tfdist's reducers."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.distribution.strategy import State
from tfdist.errors import InputError
from tfdist.gradients import Reducer, unscale
from tfdist.gradients.reducer import rows_send_less, sum_rows
from tfdist.horovod.compression import is_lossless, reducer_of
from tfdist.horovod.engine import Engine, scale_tensor
from tfdist.horovod.operations import allreduce
from tfdist.horovod.ops import Average, ReduceOp, Sum
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set

Gradient = Any  # a tensor, tf.IndexedSlices or None
_Key = tuple[str, tuple[int, ...]]  # name and shape of a state
_PLAN_SECONDS = 600.0  # maximum delay between ranks that build and trace a model


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the reduction, with the names of Horovod's arguments."""

    name: str  # prefix of the names of collectives
    compression: Any  # see `reducer_of`
    sparse_as_dense: bool  # whether slices are summed as dense tensors
    op: ReduceOp  # Average, Sum, or another operation, which the engine applies to each tensor separately
    # For a mean of N ranks, the divisor of gradients before they are summed; the sum is divided by N / factor.
    gradient_predivide_factor: float
    process_set: Any  # the ranks that reduce; other ranks keep their local gradients
    scale_local_gradients: bool  # whether gradients of local variables are divided by the number of ranks
    device_dense: str  # device on which dense gradients are reduced

    def __post_init__(self) -> None:
        """Raises `InputError` for a factor with another operation."""
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise InputError(f"gradient_predivide_factor is for op=Average. Received: op={self.op.name}. Remove it.")


class GradientSums:
    """Reduces a model's gradients over the ranks, and stores the state of the compression.

    Dense gradients are sent in buckets. Sparse gradients are sent as rows if that sends fewer bytes (see `SparseRows` for the
    cost). Results are dense. The first call with a set of gradients compares them over the job's group: ranks with different
    models raise an error with the first difference, instead of waiting for each other.
    """

    def __init__(self, options: Options):
        self.options = options
        self._plans: dict[str, list[str]] = {}  # the first rank's names of gradients, by digest of this rank's plan
        self._sends_rows: dict[str, bool] = {}
        self._states: dict[_Key, tuple[State, tf.Variable]] = {}

    def __call__(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], local_keys: Collection[int]
    ) -> list[Gradient]:
        """Returns the reduced gradients; None stays None.

        Variables have the same order on every rank. Those with keys in `local_keys` are not reduced; see `key_of`.

        Raises:
          InputError: the ranks' gradients differ in name, dtype or shape; raised on every rank.
        """
        results = list(gradients)
        names = _names(variables)
        inputs: dict[str, Gradient] = {}
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if key_of(variable) not in local_keys:
                inputs[names[i]] = self._set_static_shape(gradient, variable)
            elif self.options.scale_local_gradients:
                results[i] = unscale(gradient, engine().count(self.options.process_set))
        with tf.device(self.options.device_dense or None):
            totals = self._totals(inputs)
        for i, name in enumerate(names):
            results[i] = totals.get(name, results[i])
        return results

    def _set_static_shape(self, gradient: Gradient, variable: Any) -> Gradient:
        """Returns a gradient with the static shape of its variable; converts slices that cannot be sent as rows to dense."""
        shape = tf.TensorShape(variable.shape)
        if not shape.is_fully_defined():
            return tf.convert_to_tensor(gradient)
        if isinstance(gradient, tf.IndexedSlices) and not self.options.sparse_as_dense:
            return tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(tuple(shape), tf.int64))
        return tf.reshape(tf.convert_to_tensor(gradient), shape)

    def _totals(self, gradients: dict[str, Gradient]) -> dict[str, Gradient]:
        if self.options.process_set.included() is False:
            return {name: _to_dense(gradient) for name, gradient in gradients.items()}
        current_engine, process_set = engine(), self.options.process_set
        collectives = current_engine.collectives_of(process_set)
        is_linear = self.options.op in (Average, Sum)
        individual_gradients = {n: g for n, g in gradients.items() if not (is_linear and g.shape.is_fully_defined())}
        gradients = {n: g for n, g in gradients.items() if n not in individual_gradients}
        for name, gradient in gradients.items():
            # Never in elastic jobs, because the cost depends on the number of ranks.
            if name not in self._sends_rows:
                may_send_rows = isinstance(gradient, tf.IndexedSlices) and not current_engine.is_elastic
                self._sends_rows[name] = may_send_rows and rows_send_less(gradient, collectives)
        row_names = [n for n, g in gradients.items() if self._sends_rows[n] and isinstance(g, tf.IndexedSlices)]
        dense_gradients = {n: _to_dense(g) for n, g in gradients.items() if n not in row_names}
        digest, names = self._agree_on_names(current_engine, gradients | individual_gradients, row_names)
        message = f"{self.options.name}_{digest}"
        prescale, postscale = 1.0, 1.0
        if self.options.op == Average:
            factor, size = self.options.gradient_predivide_factor, current_engine.count(process_set)
            size = tf.cast(size, tf.float64) if isinstance(size, tf.Tensor) else size
            prescale, postscale = 1.0 / factor, factor / size
        totals: dict[str, Gradient] = {}
        for i, name in enumerate(row_names):
            rows = gradients[name]
            rows = tf.IndexedSlices(scale_tensor(rows.values, prescale), rows.indices, rows.dense_shape)
            totals[name] = sum_rows(rows, collectives, f"{message}/rows{i}")[0]
        inputs = [scale_tensor(g, prescale) for g in dense_gradients.values()]
        sums = self._dense_sums([names[name] for name in dense_gradients], inputs, collectives, message)
        totals |= dict(zip(dense_gradients, sums, strict=True))
        totals = {name: scale_tensor(total, postscale) for name, total in totals.items()}
        return totals | self._individual_totals(individual_gradients)

    def _individual_totals(self, gradients: dict[str, Gradient]) -> dict[str, Gradient]:
        options, factor, totals = self.options, self.options.gradient_predivide_factor, {}
        arguments: dict[str, Any] = {"op": options.op, "compression": options.compression}
        arguments |= {"prescale_factor": 1.0 / factor, "postscale_factor": factor, "process_set": options.process_set}
        for name, gradient in gradients.items():
            if not is_lossless(options.compression):
                raise InputError(
                    f"{options.compression} takes gradients of known shapes. Received: {name} of {gradient.shape}. "
                    "Use hvd.Compression.none or .fp16."
                )
            totals[name] = allreduce(_to_dense(gradient), **arguments)
        return totals

    def _dense_sums(
        self, names: list[str], tensors: list[tf.Tensor], collectives: Any, message: str
    ) -> list[tf.Tensor]:
        if not tensors:
            return []
        dtypes = [x.dtype if x.dtype in collectives.dtypes.reducible else tf.float32 for x in tensors]
        inputs = [tf.cast(x, dtype) for x, dtype in zip(tensors, dtypes, strict=True)]
        specs = [tf.TensorSpec(x.shape, x.dtype, name) for x, name in zip(inputs, names, strict=True)]
        reducer = reducer_of(self.options.compression, specs)
        if engine().is_elastic and not is_lossless(self.options.compression):
            assertion = tf.debugging.assert_equal(
                engine().count(self.options.process_set),
                collectives.size,
                f"{self.options.compression} was traced for {collectives.size} ranks, but the elastic job has a different "
                "number now. Trace the tf.function again after a reset, or use hvd.Compression.none",
            )
            with tf.control_dependencies([] if assertion is None else [assertion]):
                inputs = [tf.identity(tensor) for tensor in inputs]
        variables = self._variables(reducer, specs)
        state = [tf.convert_to_tensor(variable) for variable in variables]
        result = reducer.reduce(inputs, state, collectives, name=message)
        totals = result.totals
        if not is_lossless(self.options.compression):
            # Non-finite values of one rank become NaN on all ranks, and do not change the state.
            is_finite = result.all_finite()
            totals = [tf.where(is_finite, x, tf.constant(float("nan"), x.dtype)) for x in totals]
            for variable, new_value, old_value in zip(variables, result.state, state, strict=True):
                variable.assign(tf.where(is_finite, new_value, old_value))
        return [tf.cast(total, x.dtype) for total, x in zip(totals, tensors, strict=True)]

    def _variables(self, reducer: Reducer, specs: Sequence[tf.TensorSpec]) -> list[tf.Variable]:
        states = {(state.name, state.shape): state for state in reducer.state(specs)}
        with tf.init_scope():
            for key, state in states.items():
                if key not in self._states:
                    name = state.name.replace(":", "_")
                    variable = tf.Variable(state.initial_value(), trainable=False, name=name)
                    self._states[key] = state, variable
        return [self._states[key][1] for key in states]

    def reset_state(self) -> None:
        """Resets the state of the compression on this rank."""
        for state, variable in self._states.values():
            variable.assign(state.initial_value())

    def _agree_on_names(
        self, current_engine: Engine, gradients: dict[str, Gradient], row_names: list[str]
    ) -> tuple[str, dict[str, str]]:
        """Returns a digest of this set of gradients and the name of each gradient, equal on all ranks.

        The ranks compare a set of gradients on first use. Without a group of these ranks, or if a rank has joined, returns the
        names on this rank.
        """
        plan = {name: _describe(gradient) + " as rows" * (name in row_names) for name, gradient in gradients.items()}
        key = _digest(list(plan.items()))
        if key not in self._plans:
            has_group = (
                self.options.process_set is global_process_set and current_engine.group.size == current_engine.size
            )
            needs_comparison = has_group and current_engine.has_no_joined_rank()
            self._plans[key] = _compare_plans(current_engine, plan) if needs_comparison else list(plan)
        names = dict(zip(plan, self._plans[key], strict=True))
        return _digest([(names[name], kind) for name, kind in plan.items()]), names


def _compare_plans(current_engine: Engine, plan: dict[str, str]) -> list[str]:
    """Returns the names of the gradients on the first rank; layers may have different names or suffixes on other ranks."""
    group, names = current_engine.group, list(plan)
    if group.all_equal("horovod/gradients", list(plan.items()), _PLAN_SECONDS):
        return names
    same_tensors = group.all_equal("horovod/gradients/tensors", list(plan.values()), _PLAN_SECONDS)
    if not same_tensors or group.all_equal("horovod/gradients/sorted", sorted(plan), _PLAN_SECONDS):
        group.agree("horovod/gradients/named", plan, "The gradient ", _PLAN_SECONDS)
        order = {f"number {i}": name for i, name in enumerate(names)}
        group.agree("horovod/gradients/order", order, "The gradient ", _PLAN_SECONDS)
    return group.broadcast("horovod/gradients/names", names, _PLAN_SECONDS)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _describe(gradient: Gradient) -> str:
    shape = gradient.shape
    return f"{gradient.dtype.name}{shape if shape.rank is None else list(shape)}"


def _to_dense(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    dense = tf.convert_to_tensor(gradient)
    return tf.reshape(dense, gradient.shape) if gradient.shape.is_fully_defined() else dense


def _names(variables: Sequence[Any]) -> list[str]:
    names: list[str] = []
    for variable in variables:
        name = str(getattr(variable, "path", None) or getattr(variable, "name", "tensor"))
        names.append(name if name not in names else f"{name}#{len(names)}")
    return names


def key_of(variable: Any) -> int:
    """Returns a hashable key of a Keras or TensorFlow variable."""
    return id(variable.value if isinstance(variable, keras.Variable) else variable)
