"""Detects replicas that have diverged, and measures the error of lossy compression in probe steps.

To compare replicas, every copy of a replicated variable is hashed on the host, and only hashes are sent.
"""

import functools
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
from tfdist.distribution.strategy import State
from tfdist.errors import DesyncError
from tfdist.gradients import Bucketed, Reducer, ReductionResult, Sum
from tfdist.trainer.inspections import PeriodicInspection, RunView


class ErrorObserver(Reducer):
    """Wraps a reducer, and computes the errors of its compressed sums."""

    keeps_shapes = True

    def __init__(self, inner: Reducer, specs: Sequence[tf.TensorSpec], compressed_names: Sequence[str]):
        self._inner, self._specs = inner, specs
        self._indices = [i for i, spec in enumerate(specs) if spec.name in compressed_names]
        # For each compressed tensor of the last call, the relative error and the cosine, as scalars
        self.observations: list[tuple[tf.Tensor, tf.Tensor]] = []

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        return self._inner.state(specs)

    def reduce(self, tensors: Any, state: Any, collectives: Collectives, *, name: str) -> ReductionResult:
        result = self._inner.reduce(tensors, state, collectives, name=name)
        states = {spec.name: value for spec, value in zip(self.state(self._specs), state, strict=True)}
        compensated_gradients = [tensors[i] + states.get(f"{self._specs[i].name}/error", 0) for i in self._indices]
        exact_totals = Bucketed(Sum()).reduce(compensated_gradients, [], collectives, name=f"{name}/exact").totals
        totals = [result.totals[i] for i in self._indices]
        self.observations = [_distance(*pair) for pair in zip(totals, exact_totals, strict=True)]
        return result


_log = logging.getLogger(__name__)

Copies = dict[str, dict[str, str]]  # {variable and block: {device or replica: hash}}, for this process's copies


class ReplicaDivergence(PeriodicInspection):
    """Periodically compares all variables that must be equal on all replicas, and ends the run if they differ."""

    def __init__(self, run_view: RunView, period: int, variables: Callable[[], Mapping[str, tf.Variable]]):
        """Initializes the inspection; `variables` returns the variables by name, in the order in which to compare them."""
        super().__init__(period)
        self._strategy = run_view.steps.strategy
        self._variables = variables

    def inspect(self, step: int) -> dict[str, float]:
        """See base class. Raises `DesyncError` on every process if copies differ, with the first such variable."""
        variables = self._variables()
        local_copies = self._hashes(variables)
        distinct_hashes = [sorted(set(copies.values())) for copies in local_copies.values()]
        # A single exchange suffices if nothing differs, unless processes have different blocks.
        are_equal = self._strategy.peers.all_equal("divergence/digest", distinct_hashes, LONG_SECONDS)
        if self._strategy.blocks.spans_processes or not are_equal or any(len(hashes) > 1 for hashes in distinct_hashes):
            compare(step, local_copies, list(variables), self._strategy.peers)
        return {}

    def _hashes(self, variables: Mapping[str, tf.Variable]) -> Copies:
        hashes: Copies = defaultdict(dict)
        for name, variable in variables.items():
            for owner, offset, values in self._strategy.blocks.copies(variable):
                block = name if not any(offset) else f"{name} at {list(offset)}"
                hashes[block][owner] = hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
        return hashes


def compare(step: int, hashes: Copies, names: list[str], group: Group) -> None:
    """Compares hashes before a step, in the order of `names`, one variable at a time to keep messages small.

    `hashes` are the hashes of this process's copies, and all members of `group` have the same variables. Raises
    `DesyncError` if two copies of a block differ.
    """
    for index, name in enumerate(names):
        # Variables are matched by index, because names contain Keras's counters, which may differ between processes.
        partitions = ((block.partition(" at "), copies) for block, copies in hashes.items())
        local_copies = {
            separator + offset: copies for (variable, separator, offset), copies in partitions if variable == name
        }
        blocks: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        copies_by_rank = group.gather(f"divergence/{index}", local_copies, LONG_SECONDS)
        for rank, rank_copies in zip(group.ranks, copies_by_rank, strict=True):
            for block, copies in rank_copies.items():
                for owner, digest in copies.items():
                    blocks[block][digest].append(f"{owner} of {name_member(rank)}")
        for block, owners in blocks.items():
            if len(owners) > 1:
                # A launcher would restart from a checkpoint in which all copies may be equal, but wrong.
                progress_file.forbid_restart()
                raise DesyncError(_desync_message(step, name + block, sorted(owners.values(), key=len, reverse=True)))


def _desync_message(step: int, block: str, owners: list[list[str]]) -> str:
    majority, *other_owners = owners
    minorities = "; ".join(", ".join(names) for names in other_owners)
    return (
        f"All replicas must hold the same values. Received before step {step}: {block} differs: {minorities} from "
        f"{', '.join(majority)}. Look for a machine with memory errors, or code that runs on some replicas only; "
        "--resume=PATH resumes from an earlier checkpoint."
    )


class CompressionErrorMonitor(PeriodicInspection):
    """Periodically compares compressed sums of gradients with exact sums; disables compression where the error is too large.

    The relative error of a gradient is ||sent - exact|| / ||exact||, where both are sums over replicas of the gradient plus,
    with error feedback, the accumulated error. If it exceeds the limit, all processes sum that gradient exactly from this
    step on. The accumulated error is added to the first exact sum.
    """

    def __init__(self, run_view: RunView, period: int, max_error: float):
        """Initializes the inspection; `max_error` is the largest relative error allowed, or 0 for no limit."""
        super().__init__(period)
        self._run_view, self._steps, self._max_error = run_view, run_view.steps, max_error
        self._probe = functools.lru_cache(maxsize=1)(self._create_probe)

    def _create_probe(self, *overrides: tuple[str, str]) -> Callable[[Any, tf.Tensor], Any]:
        reducer = ErrorObserver(self._steps.reducer(), self._steps.specs, self._steps.compressed_names())
        return self._steps.probe(self._run_view.batch_size, reducer, read=lambda: reducer.observations)

    def inspect(self, step: int) -> dict[str, float]:
        """See base class. Returns `compression_error` and `compression_cosine`, the worst values over all gradients."""
        compressed_names, strategy = self._steps.compressed_names(), self._steps.strategy
        if not compressed_names:
            return {}
        probe = self._probe(*self._steps.overrides.items())
        _, _, observations = probe(self._run_view.batch(step), tf.constant(step, tf.int64))
        errors, cosines = ([float(strategy.local(x)[0]) for x in values] for values in zip(*observations, strict=True))
        errors, cosines = strategy.peers.broadcast("guard", [errors, cosines], LONG_SECONDS)
        self._limit(step, dict(zip(compressed_names, errors, strict=True)))
        return {"compression_error": max(errors), "compression_cosine": min(cosines)}

    def _limit(self, step: int, errors: dict[str, float]) -> None:
        """Disables compression of gradients whose error exceeds the limit; `errors` are the same on all processes."""
        large_errors = {name: e for name, e in errors.items() if not e <= self._max_error} if self._max_error else {}
        for name, error in large_errors.items():
            _log.warning(
                "From step %d on, the gradient of %s is reduced without compression: the compression error was %.3g of "
                "its norm, more than --compression_max_error=%g.", step, name, error, self._max_error
            )  # fmt: skip
        self._steps.use_exact_sums(list(large_errors))


def _distance(total: tf.Tensor, exact_total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    norm = tf.norm(exact_total)
    error = tf.math.divide_no_nan(tf.norm(total - exact_total), norm)
    return error, tf.math.divide_no_nan(tf.reduce_sum(total * exact_total), norm * tf.norm(total))
