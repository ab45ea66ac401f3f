"""Detects replicas that have diverged, and measures the error of lossy compression, by probe steps.

Every copy of every replicated variable is hashed on the host; only hashes are sent.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster import progress_file
from tfdist.collectives import Collectives
from tfdist.coordination import Group
from tfdist.coordination.group import LONG_SECONDS, name_member
from tfdist.diagnostics.interface import Periodic, RunView
from tfdist.distribution.strategy import State
from tfdist.errors import DesyncError
from tfdist.gradients import Bucketed, Reduced, Reducer, Sum


class ObservingReducer(Reducer):
    """Base class of reducers that wrap another one and observe it; subclasses implement `reduce`.

    Attributes:
      inner: the wrapped reducer.
      observed: tensors, or tuples of tensors, observed in the last call.
    """

    def __init__(self, inner: Reducer):
        """Wraps a reducer.

        Args:
          inner: the reducer.
        """
        self.inner = inner
        self.keeps_shapes = True
        self.observed: list[Any] = []

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class."""
        return self.inner.state(specs)


class ObservingTrial:
    """A probe step with an observing reducer; compiled again when the choice of compression methods changes."""

    def __init__(self, run_view: RunView, make: Callable[[], ObservingReducer]):
        """Initializes the step.

        Args:
          run_view: the run to inspect.
          make: creates the reducer for the current compression methods.
        """
        self._run_view = run_view
        self._make = make
        self._plan: dict[str, str] | None = None

    def __call__(self, step: int) -> list[Any]:
        """Runs the probe step; returns a per-replica value for each entry of `observed`."""
        steps = self._run_view.steps
        if self._plan != steps.overrides:
            self._plan = dict(steps.overrides)
            reducer = self._make()
            self._probe = steps.probe(self._run_view.batch_size, reducer, read=lambda: reducer.observed)
        _, _, observed = self._probe(self._run_view.batch(step), tf.constant(step, tf.int64))
        return observed


_log = logging.getLogger(__name__)

Copies = dict[str, dict[str, str]]  # {variable and block: {device or replica: hash}} of this process's copies


class ReplicaDivergence(Periodic):
    """Periodically compares all variables that must be equal on all replicas; ends the run if they differ."""

    def __init__(self, run_view: RunView, every: int, variables: Callable[[], Mapping[str, tf.Variable]]):
        """Initializes the inspection.

        Args:
          run_view: the run to inspect.
          every: steps between checks.
          variables: returns the current variables by name, in the order in which to compare them.
        """
        super().__init__(every)
        self._strategy = run_view.steps.strategy
        self._variables = variables

    def look(self, step: int) -> dict[str, float]:
        """See base class; returns no fields.

        Raises:
          DesyncError: on every process, naming the first variable that differs, and where.
        """
        variables = self._variables()
        mine = self._hashes(variables)
        distinct = [sorted(set(copies.values())) for copies in mine.values()]
        # One message from each process suffices if nothing differs, unless processes have different blocks.
        equal = self._strategy.peers.all_equal("divergence/digest", distinct, LONG_SECONDS)
        if self._strategy.blocks.spans_processes or not equal or any(len(hashes) > 1 for hashes in distinct):
            compare(step, mine, list(variables), self._strategy.peers)
        return {}

    def _hashes(self, variables: Mapping[str, tf.Variable]) -> Copies:
        found: Copies = defaultdict(dict)
        for name, variable in variables.items():
            for owner, offset, values in self._strategy.blocks.copies(variable):
                block = name if not any(offset) else f"{name} at {list(offset)}"
                found[block][owner] = hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
        return found


def compare(step: int, mine: Copies, names: list[str], group: Group) -> None:
    """Compares the hashes of these processes, one variable at a time to keep messages small.

    Args:
      step: step before which they are compared, for the message.
      mine: hashes of this process's copies.
      names: names of the variables, in the order in which to compare them.
      group: processes that hold the same variables.

    Raises:
      DesyncError: two copies of a block differ.
    """
    for number, name in enumerate(names):
        # Variables are matched by number: names contain Keras's counters, which may differ between processes.
        own = {
            at + place: copies
            for (whose, at, place), copies in ((block.partition(" at "), copies) for block, copies in mine.items())
            if whose == name
        }
        blocks: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        everyone = group.gather(f"divergence/{number}", own, LONG_SECONDS)
        for rank, theirs in zip(group.ranks, everyone, strict=True):
            for block, copies in theirs.items():
                for owner, digest in copies.items():
                    blocks[block][digest].append(f"{owner} of {name_member(rank)}")
        for block, holders in blocks.items():
            if len(holders) > 1:
                # A launcher would restart from a checkpoint, which may already contain the drift: all copies equal, and
                # wrong.
                progress_file.forbid_restart()
                raise DesyncError(_message(step, name + block, sorted(holders.values(), key=len, reverse=True)))


def _message(step: int, block: str, holders: list[list[str]]) -> str:
    most, *others = holders
    apart = "; ".join(", ".join(names) for names in others)
    return (
        f"All replicas must hold the same values. Received before step {step}: {block} differs: {apart} from "
        f"{', '.join(most)}. Look for a machine with memory errors, or code that runs on some replicas only; "
        "--resume=PATH resumes from an earlier checkpoint."
    )


class GradientNorms(Periodic):
    """Periodically logs the norm of each reduced gradient by rank; different norms mean that the reduction is wrong."""

    def __init__(self, run_view: RunView, every: int):
        """Initializes the inspection.

        Args:
          run_view: the run to inspect.
          every: steps between checks.
        """
        super().__init__(every)
        self._steps = run_view.steps
        self._observe = ObservingTrial(run_view, lambda: Norms(self._steps.reducer()))

    def look(self, step: int) -> dict[str, float]:
        """See base class; returns no fields."""
        strategy = self._steps.strategy
        mine = [[float(value) for value in strategy.local(norm)] for norm in self._observe(step)]
        everyone = strategy.peers.gather("divergence/norms", mine, LONG_SECONDS)
        if strategy.is_chief:
            for i, spec in enumerate(self._steps.specs[:-1]):
                norms = [f"{value:.9g}" for rank in everyone for value in rank[i]]
                same = "" if len(set(norms)) == 1 else "  DIFFERENT"
                _log.info("step %d  gradient of %s  norm by replica: %s%s", step, spec.name, " ".join(norms), same)
        return {}


class Norms(ObservingReducer):
    """Reduces with another reducer, and observes the norms of its sums.

    Attributes:
      observed: a scalar norm for each gradient of the last call.
    """

    def reduce(self, tensors: Any, state: Any, collectives: Collectives, *, name: str) -> Reduced:
        """See base class."""
        reduced = self.inner.reduce(tensors, state, collectives, name=name)
        self.observed = [tf.norm(tf.cast(total, tf.float64)) for total in reduced.totals[:-1]]
        return reduced


class CompressionErrorMonitor(Periodic):
    """Periodically reduces the compressed gradients also exactly; disables compression where the error is too large.

    The relative error of a gradient is ||sent - exact|| / ||exact||, of the sums over replicas of what the step was to
    send: with error feedback this includes the accumulated error. If it exceeds the limit, all processes sum that
    gradient exactly from this step on; the accumulated error is added to the first exact sum.
    """

    def __init__(self, run_view: RunView, every: int, max_error: float):
        """Initializes the inspection.

        Args:
          run_view: the run to inspect.
          every: steps between measurements.
          max_error: largest relative error allowed; 0 for no limit.
        """
        super().__init__(every)
        self._steps = run_view.steps
        self._max_error = max_error
        self._observe = ObservingTrial(run_view, self._both_ways)

    def _both_ways(self) -> "BothWays":
        return BothWays(self._steps.reducer(), self._steps.specs, self._steps.compressed_names())

    def look(self, step: int) -> dict[str, float]:
        """See base class; `compression_error` and `compression_cosine`, the worst over all gradients."""
        watched, strategy = self._steps.compressed_names(), self._steps.strategy
        if not watched:
            return {}
        observed = self._observe(step)
        errors, cosines = ([float(strategy.local(x)[0]) for x in values] for values in zip(*observed, strict=True))
        found = strategy.peers.broadcast("guard", [errors, cosines], LONG_SECONDS)
        self._judge(step, dict(zip(watched, found[0], strict=True)))
        return {"compression_error": max(found[0]), "compression_cosine": min(found[1])}

    def _judge(self, step: int, errors: dict[str, float]) -> None:
        """Disables compression of gradients beyond the limit; all processes have the same errors, so they agree."""
        far = {name: error for name, error in errors.items() if not error <= self._max_error} if self._max_error else {}
        for name, error in far.items():
            _log.warning(
                "From step %d on, the gradient of %s is reduced without compression: the compression error was %.3g of "
                "its norm, more than --compression_max_error=%g.", step, name, error, self._max_error
            )  # fmt: skip
        self._steps.fall_back(list(far))


class BothWays(ObservingReducer):
    """Reduces with another reducer, and measures the error of its sums against exact ones.

    Attributes:
      observed: for each watched tensor, the relative error and the cosine of the last call, scalars.
    """

    def __init__(self, inner: Reducer, specs: Sequence[tf.TensorSpec], watched: Sequence[str]):
        """Wraps a reducer.

        Args:
          inner: reducer whose error is measured.
          specs: specs of all tensors.
          watched: names of the tensors to compare.
        """
        super().__init__(inner)
        self._specs = list(specs)
        self._watched = [i for i, spec in enumerate(specs) if spec.name in watched]

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class."""
        kept = dict(zip((s.name for s in self.inner.state(self._specs)), state, strict=True))
        inner = self.inner.reduce(tensors, state, collectives, name=name)
        wanted = [tensors[i] + kept.get(f"{self._specs[i].name}/error", 0) for i in self._watched]
        exact = Bucketed(Sum()).reduce(wanted, [], collectives, name=f"{name}/exact").totals
        self.observed = [_distance(inner.totals[i], whole) for i, whole in zip(self._watched, exact, strict=True)]
        return inner


def _distance(sent: tf.Tensor, exact: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    norm = tf.norm(exact)
    error = tf.math.divide_no_nan(tf.norm(sent - exact), norm)
    return error, tf.math.divide_no_nan(tf.reduce_sum(sent * exact), norm * tf.norm(sent))
