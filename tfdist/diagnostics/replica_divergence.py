"""Detects replicas that have diverged: a flipped bit, a faulty kernel or a bug makes them drift silently.

Every copy of every replicated variable is hashed on the host; only hashes are sent.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.coordination import Group
from tfdist.coordination.group import name_member
from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.diagnostics.interface import Periodic, RunView
from tfdist.diagnostics.observed_reducer import ObservingReducer, ObservingTrial
from tfdist.errors import DesyncError
from tfdist.gradients import Reduced
from tfdist.process import progress_file

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
