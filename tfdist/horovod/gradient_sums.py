"""Reduction of gradients for the distributed optimizer and the distributed tape, by tfdist's reducers."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.distribution.strategy import State
from tfdist.errors import InputError
from tfdist.gradients import Reducer, unscaled
from tfdist.gradients.reducer import rows_send_less, sum_rows
from tfdist.horovod.compression import Compression, is_lossless, reducer_of
from tfdist.horovod.engine import Engine, scaled
from tfdist.horovod.object_exchange import broadcast_object
from tfdist.horovod.ops import Average, ReduceOp, Sum
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set
from tfdist.horovod.reductions import allreduce

Gradient = Any  # a tensor, tf.IndexedSlices or None
_Key = tuple[str, tuple[int, ...]]  # name and shape of a state
_PLAN_SECONDS = 600.0  # that one rank may take longer than another to build and trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How gradients are reduced; Horovod's arguments.

    Attributes:
      name: name of the messages.
      compression: see `reducer_of`.
      sparse_as_dense: whether slices are summed as dense tensors.
      op: Average, Sum, or another one, which the engine applies tensor by tensor.
      gradient_predivide_factor: with Average, gradients are divided by it before the sum, and by the rest of the
        divisor after it.
      process_set: the ranks that reduce; other ranks keep their own gradients.
      scale_local_gradients: whether gradients of local variables are divided by the number of ranks.
      device_dense: device on which dense gradients are reduced.
    """

    name: str
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    process_set: Any = global_process_set
    scale_local_gradients: bool = True
    device_dense: str = ""


class GradientSums:
    """Reduces a model's gradients over the ranks, and stores the state of the compression.

    Dense gradients are sent in tfdist's buckets, and slices as rows if that sends less (see `SparseRows` for the cost);
    results are dense. The choice is made at the first call with a set of gradients, and is then compared over the job's
    group: ranks whose models differ get an error that names the first difference, instead of waiting for each other.
    """

    def __init__(self, options: Options):
        self.options = options
        self._plans: dict[str, list[str]] = {}  # names of gradients on the first rank, by what this rank's are
        self._rows: dict[str, bool] = {}
        self._variables_by_state: dict[_Key, tf.Variable] = {}
        self._states: dict[_Key, State] = {}
        self._received_values: dict[_Key, Any] = {}  # initial values of variables to be created

    def __call__(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], local: Collection[int]
    ) -> list[Gradient]:
        """Returns the reduced gradients; None stays None.

        Args:
          gradients: this rank's gradients, one per variable.
          variables: their variables, in the same order on every rank.
          local: variables whose gradients are not reduced, by `key_of`.

        Raises:
          InputError: on every rank, if the ranks' gradients differ in name, dtype or shape.
        """
        results = list(gradients)
        names = _names(variables)
        reduced: dict[str, Gradient] = {}
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if key_of(variable) not in local:
                reduced[names[i]] = self._with_static_shape(gradient, variable)
            elif self.options.scale_local_gradients:
                results[i] = unscaled(gradient, engine().count(self.options.process_set))
        with tf.device(self.options.device_dense or None):
            totals = self._totals(reduced)
        for i, name in enumerate(names):
            results[i] = totals.get(name, results[i])
        return results

    def _with_static_shape(self, gradient: Gradient, variable: Any) -> Gradient:
        """Returns a gradient with its variable's static shape, if any; keeps slices only if they may be sent as rows."""
        shape = tf.TensorShape(variable.shape)
        if not shape.is_fully_defined():
            return tf.convert_to_tensor(gradient)
        if isinstance(gradient, tf.IndexedSlices) and not self.options.sparse_as_dense:
            return tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(tuple(shape), tf.int64))
        return tf.reshape(tf.convert_to_tensor(gradient), shape)

    def _totals(self, gradients: dict[str, Gradient]) -> dict[str, Gradient]:
        if self.options.process_set.included() is False:
            return {name: _dense(gradient) for name, gradient in gradients.items()}
        current = engine()
        collectives = current.collectives_of(self.options.process_set)
        summed = self.options.op in (Average, Sum)
        individual = {n: g for n, g in gradients.items() if not (summed and g.shape.is_fully_defined())}
        gradients = {n: g for n, g in gradients.items() if n not in individual}
        for name, gradient in gradients.items():
            if name not in self._rows:
                self._rows[name] = self._is_sent_as_rows(gradient, current, collectives)
        rows = [n for n, g in gradients.items() if self._rows[n] and isinstance(g, tf.IndexedSlices)]
        dense = {n: _dense(g) for n, g in gradients.items() if n not in rows}
        digest, names = self._agree_on_names(current, gradients | individual, rows)
        message = f"{self.options.name}_{digest}"
        mean = self.options.op == Average
        before = 1.0 / self.options.gradient_predivide_factor if mean else 1.0
        after = (
            _quotient(self.options.gradient_predivide_factor, current.count(self.options.process_set)) if mean else 1.0
        )
        totals: dict[str, Gradient] = {}
        for i, name in enumerate(rows):
            totals[name] = sum_rows(_scaled_rows(gradients[name], before), collectives, f"{message}/rows{i}")[0]
        scaled_before = [scaled(g, before) for g in dense.values()]
        sums = self._dense_sums([names[name] for name in dense], scaled_before, collectives, message)
        totals |= dict(zip(dense, sums, strict=True))
        return self._individual_totals(individual) | {name: scaled(total, after) for name, total in totals.items()}

    def _is_sent_as_rows(self, gradient: Gradient, current: Engine, collectives: Any) -> bool:
        """Returns whether slices are sent as rows: never if the number of ranks, on which the cost depends, may change."""
        if current.is_elastic or not isinstance(gradient, tf.IndexedSlices):
            return False
        return rows_send_less(gradient, collectives)

    def _individual_totals(self, gradients: dict[str, Gradient]) -> dict[str, Gradient]:
        """Reduces gradients that buckets and methods do not support tensor by tensor, through the engine."""
        factor = self.options.gradient_predivide_factor
        for name, gradient in gradients.items():
            if not is_lossless(self.options.compression):
                raise InputError(
                    f"{self.options.compression} takes gradients of known shapes. Received: {name} of {gradient.shape}. "
                    "Use hvd.Compression.none or .fp16 for it."
                )
        return {
            name: allreduce(
                _dense(gradient),
                op=self.options.op,
                compression=self.options.compression,
                prescale_factor=1.0 / factor,
                postscale_factor=factor,
                process_set=self.options.process_set,
            )
            for name, gradient in gradients.items()
        }

    def _dense_sums(
        self, names: list[str], tensors: list[tf.Tensor], collectives: Any, message: str
    ) -> list[tf.Tensor]:
        if not tensors:
            return []
        wire = [x.dtype if x.dtype in collectives.wire.reduces else tf.float32 for x in tensors]
        sent = [tf.cast(x, dtype) for x, dtype in zip(tensors, wire, strict=True)]
        specs = [tf.TensorSpec(x.shape, x.dtype, name) for x, name in zip(sent, names, strict=True)]
        reducer = reducer_of(self.options.compression, specs)
        if engine().is_elastic and not is_lossless(self.options.compression):
            sent = _assert_same_size(sent, collectives.size, self.options)
        state = self._variables(reducer, specs)
        before = [tf.convert_to_tensor(variable) for variable in state]
        result = reducer.reduce(sent, before, collectives, name=message)
        totals = result.totals
        if not is_lossless(self.options.compression):
            # Non-finite values of one rank become visible on all, and do not reach the state.
            finite = result.all_finite()
            totals = [tf.where(finite, x, tf.constant(float("nan"), x.dtype)) for x in totals]
            for variable, new, old in zip(state, result.state, before, strict=True):
                variable.assign(tf.where(finite, new, old))
        return [tf.cast(total, x.dtype) for total, x in zip(totals, tensors, strict=True)]

    def _variables(self, reducer: Reducer, specs: Sequence[tf.TensorSpec]) -> list[tf.Variable]:
        states = reducer.state(specs)
        with tf.init_scope():
            for state in states:
                if (state.name, state.shape) not in self._variables_by_state:
                    value = self._received_values.pop((state.name, state.shape), state.initial)
                    self._states[state.name, state.shape] = state
                    self._variables_by_state[state.name, state.shape] = _variable(
                        dataclasses.replace(state, initial=value)
                    )
        return [self._variables_by_state[state.name, state.shape] for state in states]

    def reset_state(self) -> None:
        """Resets the state of the compression on this rank."""
        self._received_values.clear()
        for key, variable in self._variables_by_state.items():
            variable.assign(_initial(self._states[key]))

    def synchronize(self) -> None:
        """Sets the compression's shared state to that of the first rank and resets per-rank state.

        Every rank must call it; a rank that has not reduced anything yet starts with the others' state.
        """
        shared = {k: v.numpy() for k, v in self._variables_by_state.items() if not self._states[k].per_replica}
        self.reset_state()
        ranks = self.options.process_set
        if ranks.included():
            self._received_values = broadcast_object(shared, ranks.ranks[0], name="compression", process_set=ranks)
        for key in self._variables_by_state.keys() & self._received_values.keys():
            self._variables_by_state[key].assign(self._received_values.pop(key))

    def _agree_on_names(
        self, current: Engine, gradients: dict[str, Gradient], rows: list[str]
    ) -> tuple[str, dict[str, str]]:
        """Returns a short name for this set of gradients and the name of each, the same on all ranks.

        Ranks compare a set at its first use. Without a group of these ranks, or once one has joined, the names are those of
        this rank.
        """
        plan = {name: _describe(gradient) + " as rows" * (name in rows) for name, gradient in gradients.items()}
        key = _digest(list(plan.items()))
        if key not in self._plans:
            compares = self.options.process_set is global_process_set and current.group.size == current.size
            self._plans[key] = (
                _compare_plans(current, plan) if compares and current.has_no_joined_rank() else list(plan)
            )
        names = dict(zip(plan, self._plans[key], strict=True))
        return _digest([(names[name], kind) for name, kind in plan.items()]), names


def _compare_plans(current: Engine, plan: dict[str, str]) -> list[str]:
    """Returns the first rank's names of the gradients; others may have loaded or numbered their layers differently.

    Raises:
      InputError: on every rank, if dtypes and shapes differ, or if the same names are in another order.
    """
    digests = [_digest(list(plan.items())), _digest(list(plan.values())), _digest(sorted(plan))]
    same, same_kinds, same_names = (
        len(set(of_ranks)) == 1
        for of_ranks in zip(*current.group.gather("horovod/gradients", digests, _PLAN_SECONDS), strict=True)
    )
    if same:
        return list(plan)
    if same_names or not same_kinds:
        current.group.agree("horovod/gradients/named", plan, "The gradient ", _PLAN_SECONDS)
        order = {f"number {i}": name for i, name in enumerate(plan)}
        current.group.agree("horovod/gradients/order", order, "The gradient ", _PLAN_SECONDS)
    return current.group.broadcast("horovod/gradients/names", list(plan), _PLAN_SECONDS)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _assert_same_size(tensors: list[tf.Tensor], size: int, options: Options) -> list[tf.Tensor]:
    """Adds an assertion to the graph that the number of ranks is the same as when it was traced."""
    now = engine().count(options.process_set)
    same = tf.debugging.assert_equal(
        now,
        size,
        f"{options.compression} was traced for {size} ranks, but the elastic job has a different number now. Trace the "
        "tf.function again after a reset, or use hvd.Compression.none",
    )
    with tf.control_dependencies([] if same is None else [same]):
        return [tf.identity(tensor) for tensor in tensors]


def _variable(state: State) -> tf.Variable:
    return tf.Variable(_initial(state), trainable=False, name=state.name.replace(":", "_"))


def _initial(state: State) -> tf.Tensor:
    return tf.broadcast_to(tf.cast(state.initial, state.dtype), state.shape)


def _describe(gradient: Gradient) -> str:
    shape = gradient.shape
    return f"{gradient.dtype.name}{shape if shape.rank is None else list(shape)}"


def _dense(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    dense = tf.convert_to_tensor(gradient)
    return tf.reshape(dense, gradient.shape) if gradient.shape.is_fully_defined() else dense


def _scaled_rows(slices: tf.IndexedSlices, factor: float) -> tf.IndexedSlices:
    return tf.IndexedSlices(scaled(slices.values, factor), slices.indices, slices.dense_shape)


def _quotient(factor: float, size: int | tf.Tensor) -> float | tf.Tensor:
    return tf.constant(factor, tf.float64) / tf.cast(size, tf.float64) if isinstance(size, tf.Tensor) else factor / size


def _names(variables: Sequence[Any]) -> list[str]:
    """Returns a unique name for each variable: its path or name, with a number appended to repeated ones."""
    names: list[str] = []
    for variable in variables:
        name = str(getattr(variable, "path", None) or getattr(variable, "name", "tensor"))
        names.append(name if name not in names else f"{name}#{len(names)}")
    return names


def key_of(variable: Any) -> int:
    """Returns the identity of a variable, for sets and dicts: variables of Keras and TensorFlow are not hashable."""
    return id(variable.value if isinstance(variable, keras.Variable) else variable)
