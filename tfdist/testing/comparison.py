"""Compares a strategy's training with that of a single device, step by step and variable by variable.

Both start from the same weights and use the same global batches. Every variable of every step is compared by norms: ||a
- b|| / ||b||. The weights of the strategy's steps are stored on the host until the reference has made the same step, so
this takes the memory of (steps + 1) copies of the model; twice that in bfloat16.

In bfloat16 a relative norm is not meaningful: a bias near zero, or a variable whose gradient is only rounding error,
which Adam scales to full steps, differs by its own size. There the reference is also trained in float32, and
differences are measured in roundings: in units of the difference between 16 and 32 bits on one device.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals, models
from tfdist.cli.run import Session, make_trainer, warn_of_flags
from tfdist.cluster.environment import Cluster
from tfdist.config.staleness import LAZY
from tfdist.config.strategy_registry import REFERENCE
from tfdist.config.train_config import VerifyConfig
from tfdist.coordination import LocalGroup
from tfdist.data import Pipeline
from tfdist.data.batches import count_rows
from tfdist.distribution.factory import create
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.reporting.warn_once import warn_once
from tfdist.row_semantics.declarations import checked
from tfdist.row_semantics.explanation import Explanation, using_listener
from tfdist.testing.parity import digest
from tfdist.testing.replay import Replay
from tfdist.trainer.options import Schedule
from tfdist.trainer.run_warnings import ONE_DEVICE
from tfdist.trainer.trainer import Trainer

MOST_ROUNDINGS = 4.0  # two runs in 16 bits differ by about one rounding, a bug by ten or more
_MIN_NORM = 1e-30
REFERENCE_SECONDS = 24 * 3600.0  # the other processes wait for the reference

# By precision and kind of optimizer: one that divides by a gradient's own size turns the rounding error of a small
# gradient into a full step, so its weights may differ more without being wrong.
TOLERANCES = {
    ("float64", "linear"): 1e-9,
    ("float64", "adaptive"): 1e-8,
    ("float32", "linear"): 1e-5,
    ("float32", "adaptive"): 1e-3,
}
LINEAR = ("SGD", "MomentumCorrectedSGD")
_STEPS_PER_REPLAY = 10  # in calls of one step, no gradient is ever stale
NOISE = {"float64": 1e-12, "float32": 1e-5}  # a gradient this small, relative to the model's largest, is rounding error


class Step(NamedTuple):
    """The comparison of one step.

    Attributes:
      number: number of the step, from 1.
      loss: loss of the strategy.
      reference_loss: loss of one device.
      difference: the largest difference of a variable, relative or in roundings.
      absolute_difference: the largest difference of an element of this variable.
      variable: path of this variable.
    """

    number: int
    loss: float
    reference_loss: float
    difference: float
    absolute_difference: float
    variable: str


class Comparison(NamedTuple):
    """The result of `verify`.

    Attributes:
      tolerance: the largest difference that passes.
      unit: of differences: "relative", or "roundings" of 16 bits.
      steps: the comparison of each step.
      replicas_equal: whether the replicas are equal bit for bit.
      not_compared: paths of variables whose true gradient is zero.
      different_by_design: paths of layers that draw numbers or take statistics for each replica.
    """

    tolerance: float
    unit: str
    steps: list[Step]
    replicas_equal: bool
    not_compared: list[str]
    different_by_design: list[str]

    @property
    def largest(self) -> float:
        """The largest difference of all steps."""
        return max(step.difference for step in self.steps)

    @property
    def is_equal(self) -> bool:
        """Whether all replicas are bitwise equal and no step exceeds the tolerance."""
        return self.replicas_equal and self.largest <= self.tolerance


def tolerance(config: VerifyConfig, optimizer: keras.Optimizer) -> float:
    """Returns the largest difference that passes: that of the flag, or a default for precision and optimizer."""
    if in_roundings(config):
        return MOST_ROUNDINGS
    kind = "linear" if type(optimizer).__name__ in LINEAR else "adaptive"
    return config.tolerance or TOLERANCES[(keras.config.floatx(), kind)]


def in_roundings(config: VerifyConfig) -> bool:
    """Returns whether differences are measured in roundings of 16 bits."""
    return config.precision == "mixed_bfloat16" and not config.tolerance


def verify(session: Session, say: Callable[[str], None]) -> Comparison | None:
    """Trains with the strategy on every process and the reference on the first; reports each step's differences.

    Args:
      session: session whose config is a `VerifyConfig`.
      say: called with each line of the result.

    Returns:
      The result; None on processes other than the first.
    """
    tested = make_trainer(session, session.strategy)
    if session.strategy.is_chief and session.strategy.devices_in_total == 1:
        warn_once(
            f"Strategy {session.strategy.name} has one device here, so one device is compared with itself, which shows "
            "nothing about several. Add --devices=2, or start several processes by `tfdist launch`.",
            situation=ONE_DEVICE,
        )
    warn_of_flags(session.config, session.strategy, tested.model)
    trace: list[dict[str, np.ndarray]] = []
    with using_listener(lambda found: _print_values(found, say)) if session.strategy.batch_parts > 1 else nullcontext():
        tested.build(session.data.train)
    remote = session.strategy.remote
    if remote and remote.tables.numbers and remote.sparse_updates == LAZY:
        raise InputError(
            "A verification compares with Keras on one device, which updates all rows of an embedding. Received: "
            "--sparse_updates=lazy. Use --sparse_updates=exact."
        )
    is_replayed = bool(remote) and remote.whole_batches and remote.staleness.bound != 0
    if is_replayed:
        remote.records_updates = True
    per_call = _STEPS_PER_REPLAY if is_replayed else 1
    calls = _run(session, tested, lambda: trace.append(_values(session.strategy, tested.model)), per_call)
    equal = _replicas_equal(session.strategy, tested.model)
    if not session.strategy.is_chief:
        return None
    single = create(REFERENCE, Cluster(), lambda _: LocalGroup())
    reference_config = dataclasses.replace(session.config, compression="none", balance="equal")
    rounding = (
        _Rounding(dataclasses.replace(session, config=reference_config), single)
        if in_roundings(reference_config)
        else None
    )
    reference = make_trainer(dataclasses.replace(session, config=reference_config), single)
    reference.build(session.data.train)
    if is_replayed:
        recorded: Any = tested.program.synchronizer
        updates = recorded.updates
        replay = Replay(reference.model, single, updates, remote.servers.placement)
        reference._program = reference.program._replace(synchronizer=replay)
    noise = _noise(session, reference)
    by_design = _different_by_design(session, reference.model)
    limit = tolerance(session.config, reference.model.optimizer)
    if is_replayed:
        stalest = max(update.version - min(update.versions) for update in updates)
        say(f"One device makes the same updates from the same weights, which were up to {stalest} updates old.")
    _print_header(session, reference.model, by_design, limit, say)
    lines: list[tuple[float, float, str]] = []

    def compare() -> None:
        values, expected = trace.pop(0), _values(single, reference.model)
        sizes = rounding.next(expected) if rounding else {path: _norm(value) or 1.0 for path, value in expected.items()}
        deltas = {path: values[path] - value for path, value in expected.items()}
        norms = {path: rounding.norm(path, value) if rounding else _norm(value) for path, value in deltas.items()}
        differences = {
            path: (norms[path] / sizes[path], float(np.max(np.abs(value), initial=0.0)))
            for path, value in deltas.items()
        }
        compared = {path: d for path, d in differences.items() if path not in noise} or differences
        path = max(compared, key=lambda p: compared[p][0])
        lines.append((*compared[path], path))

    expected = _run(session, reference, compare, per_call)
    steps = [Step(a.step, a.loss, b.loss, *line) for a, b, line in zip(calls, expected, lines, strict=True)]
    result = Comparison(limit, "roundings" if rounding else "relative", steps, equal, sorted(noise), by_design)
    _print_result(result, say)
    return result


def _print_values(explanation: Explanation, say: Callable[[str], None]) -> None:
    for line in (explanation.summary, *map(": ".join, explanation.rows(all_values=False))):
        say(line)


def _print_result(result: Comparison, say: Callable[[str], None]) -> None:
    for number, a, b, difference, absolute, path in result.steps:
        mark = "" if difference <= result.tolerance else "  <- exceeds the tolerance"
        say(f"{number:5d}  {a:<14.8g} {b:<14.8g} {difference:9.2e} {absolute:9.2e}  {path}{mark}")
    for path in result.not_compared:
        say(f"Not compared: {path}, whose true gradient is zero, so that its differences are rounding errors.")
    equal = result.replicas_equal
    say("Replicas are equal bit for bit." if equal else "REPLICAS DIFFER: their weights are not equal bit for bit.")
    say(
        f"{'Equal' if result.is_equal else 'NOT EQUAL'}: the largest difference is {result.largest:.2e} {result.unit}; the "
        f"tolerance {result.tolerance:.0e}."
    )


class _Rounding:
    """The effect of 16 bits on the training of one device, step by step."""

    def __init__(self, session: Session, single: Strategy):
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float32")
        exact = dataclasses.replace(session, config=dataclasses.replace(session.config, precision="float32"))
        trainer = make_trainer(exact, single)
        trainer.build(session.data.train)
        self._first = _values(single, trainer.model)
        self._steps: list[dict[str, np.ndarray]] = []
        self._changed: dict[str, np.ndarray] = {}
        _run(exact, trainer, lambda: self._steps.append(_values(single, trainer.model)))
        keras.config.set_dtype_policy(policy)

    def next(self, rounded: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns for each variable the difference between 16 and 32 bits after the next step.

        It is relative to the change since the first step, and at least the median over variables.
        """
        exact = self._steps.pop(0)
        self._changed = {path: exact[path] != self._first[path] for path in exact}
        roundings = {path: self.norm(path, rounded[path] - exact[path]) for path in exact}
        changes = {path: self.norm(path, exact[path] - self._first[path]) for path in exact}
        usual = float(np.median([roundings[path] / change for path, change in changes.items() if change] or [0.0]))
        return {path: max(roundings[path], usual * changes[path], _MIN_NORM) for path in exact}

    def norm(self, path: str, difference: np.ndarray) -> float:
        """Returns the norm of a variable's difference at this step, without the largest 5% of its trained elements.

        Adam makes a full step of a gradient whose sign is rounding error.
        """
        changed = self._changed[path]
        sizes, rest = np.abs(difference[changed]), np.abs(difference[~changed])
        kept = len(sizes) - (math.ceil(len(sizes) / 20) if len(sizes) >= 5 else 0)
        return math.hypot(_norm(np.sort(sizes)[:kept]), _norm(rest)) if np.isfinite(difference).all() else math.inf


class Call(NamedTuple):
    """A call of the loop: the step after it, its number of steps, and their mean loss."""

    step: int
    steps: int
    loss: float


def _run(session: Session, trainer: Trainer, after_call: Callable[[], None], per_call: int = 1) -> list[Call]:
    """Trains, and returns the calls of the loop."""
    config = session.config
    calls: list[Call] = []
    epoch: list[Call] = []

    def on_epoch_begin(*_: Any) -> None:
        epoch.clear()

    def on_call_end(_: int, logs: dict[str, float]) -> None:
        steps = trainer.step - (calls[-1].step if calls else 0)
        # Keras's logs contain the mean since the start of the epoch.
        total = logs["loss"] * (sum(call.steps for call in epoch) + steps) - sum(
            call.loss * call.steps for call in epoch
        )
        calls.append(Call(trainer.step, steps, total / steps))
        epoch.append(calls[-1])
        after_call()

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=on_epoch_begin, on_train_batch_end=on_call_end)
    trainer.fit(
        session.data.train,
        batch_size=config.batch_size,
        steps=config.steps or None,
        epochs=config.epochs or None,
        schedule=Schedule(steps_per_call=per_call),
        callbacks=[callback],
        verbose=0,
    )
    return calls


def _values(strategy: Strategy, model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the weights; on the chief those of the whole model, elsewhere those of this process."""
    with strategy.parts.full_model(model) as full_model:
        return {
            v.path: np.asarray(tf.convert_to_tensor(strategy.local(v.value)[0]), np.float64)
            for v in full_model.variables
            if tf.as_dtype(v.dtype).is_floating and (strategy.is_chief or keras_internals.value_of(v) is not None)
        }


def _norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(value))


def _replicas_equal(strategy: Strategy, model: keras.Model) -> bool:
    trainable = [strategy.local(v.value) for v in model.trainable_variables]
    digests = [digest([values[i] for values in trainable]) for i in range(len(strategy.local_replicas))]
    digests_by_rank = strategy.peers.gather("verify/digests", digests, deadline=REFERENCE_SECONDS)
    equal = len({each for digests in digests_by_rank if digests for each in digests}) == 1  # without lost workers
    return False not in strategy.group.gather("verify/equal", equal, deadline=REFERENCE_SECONDS)


def _noise(session: Session, reference: Trainer) -> set[str]:
    """Returns variables whose true gradient is zero: those in the model's table, and those measured to be so small."""
    model = reference.model
    patterns = models.zero_gradient_patterns(session.config.model)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(_first_batch(session))
    state = [(variable, tf.identity(variable.value)) for variable in model.non_trainable_variables]
    limit = TOLERANCES[keras.config.floatx(), "adaptive"]
    with tf.GradientTape() as tape, checked(int(count_rows(x)), limit):
        loss = model.compute_loss(x, y, model(x, training=True), sample_weight=weight, training=True)
    for variable, value in state:  # undoes changes of moving averages and random states
        variable.assign(value)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    sizes = {
        v.path: float(tf.reduce_max(tf.abs(tf.convert_to_tensor(g))))
        for v, g in zip(model.trainable_variables, gradients, strict=True)
        if g is not None
    }
    threshold = NOISE[keras.config.floatx()] * max(sizes.values(), default=0.0)
    by_name = {path for path in sizes if any(re.search(pattern, path) for pattern in patterns)}
    return by_name | {path for path, size in sizes.items() if size <= threshold}


def _first_batch(session: Session) -> Any:
    pipeline = Pipeline(session.data.train, session.config.batch_size, session.config.seed)
    return next(iter(pipeline.dataset([0], 1)))


def _print_header(
    session: Session, model: keras.Model, by_design: list[str], limit: float, say: Callable[[str], None]
) -> None:
    say(f"{session.detection.reason}")
    for path in by_design:
        say(f"Differs by design: {path} draws numbers or takes statistics for each replica; do not expect equality.")
    if in_roundings(session.config):
        say(
            "Differences are in roundings: multiples of the distance between bfloat16 and float32 on one device. "
            f"Tolerance {limit:.0e}."
        )
    else:
        say(f"Tolerance {limit:.0e} for {keras.config.floatx()} and {type(model.optimizer).__name__}.")
    unit = "roundings" if in_roundings(session.config) else "relative"
    say(f"{'step':>5}  {'loss':<14} {'of one device':<14} {unit:>9} {'absolute':>9}  largest difference in")


def _different_by_design(session: Session, model: keras.Model) -> list[str]:
    return [
        keras_internals.path_of(layer)
        for layer in keras_internals.layers_of(model)
        if _takes_local_statistics(layer, session) or _draws_local_numbers(layer, session)
    ]


def _takes_local_statistics(layer: keras.Layer, session: Session) -> bool:
    return type(layer) is keras.layers.BatchNormalization and layer.trainable and session.strategy.replicas > 1


def _draws_local_numbers(layer: keras.Layer, session: Session) -> bool:
    """Returns whether parts of a batch draw numbers of their own, or, on a mesh, a micro-step has other rows."""
    strategy = session.strategy
    in_parts = strategy.replicas > 1 or session.config.accumulate_steps > 1 or strategy.micro_batches > 0
    draws = bool(getattr(layer, "_seed_generators", ())) or hasattr(layer, "seed_generator")
    return in_parts and draws and bool(getattr(layer, "rate", getattr(layer, "stddev", 0)))
