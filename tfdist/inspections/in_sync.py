"""Whether all replicas still hold the same values: a flipped bit, a wrong kernel or a mistake makes them drift without a word.

Every copy of every variable that must be alike is hashed on the host; only hashes travel.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.errors import DesyncError
from tfdist.gradients import Reduced, Reducer
from tfdist.group import Group
from tfdist.group.contract import name_member
from tfdist.inspections.contract import Inspection, Site
from tfdist.inspections.exposure import TRIAL_SECONDS
from tfdist.strategy import State

_log = logging.getLogger(__name__)

Copies = dict[
    str, dict[str, str]
]  # by variable and block, the hash of each of a process's copies by its device or replica


class InSync(Inspection):
    """Compares all variables that replicas have alike, every so many steps, and ends the run where they differ."""

    def __init__(self, site: Site, every: int, variables: Callable[[], Mapping[str, tf.Variable]]):
        """Args: every: steps between two looks; variables: those of now, by name, in the order in which they are compared."""
        self._strategy = site.steps.strategy
        self._every = every
        self._variables = variables

    def next(self, step: int) -> int | None:
        """See base class."""
        return max(self._every, -(-step // self._every) * self._every)

    def look(self, step: int) -> dict[str, float]:
        """See base class; no fields.

        Raises:
          DesyncError: on every process, naming the first variable that differs, and where.
        """
        variables = self._variables()
        mine = self._hashes(variables)
        whole = hashlib.sha256(repr([sorted(set(copies.values())) for copies in mine.values()]).encode()).hexdigest()
        alike = all(len(set(copies.values())) == 1 for copies in mine.values())
        # One word of each process is enough, as long as all is well. On a mesh processes may hold different blocks.
        said = self._strategy.group.gather("in_sync/whole", [alike, whole], TRIAL_SECONDS)
        if self._strategy.global_view or not all(a and w == whole for a, w in said):
            compare(step, mine, list(variables), self._strategy.group)
        return {}

    def _hashes(self, variables: Mapping[str, tf.Variable]) -> Copies:
        found: Copies = defaultdict(dict)
        for name, variable in variables.items():
            for owner, offset, values in self._strategy.copies(variable):
                block = name if not any(offset) else f"{name} at {list(offset)}"
                found[block][owner] = hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
        return found


def compare(step: int, mine: Copies, names: list[str], group: Group) -> None:
    """Holds all processes' hashes against each other, one variable after the other, so that messages stay small.

    Raises:
      DesyncError: two copies of a block differ.
    """
    for number, name in enumerate(names):
        own = {block: copies for block, copies in mine.items() if block.partition(" at ")[0] == name}
        blocks: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for rank, theirs in enumerate(group.gather(f"in_sync/{number}", own, TRIAL_SECONDS)):
            for block, copies in theirs.items():
                for owner, digest in copies.items():
                    blocks[block][digest].append(f"{owner} of {name_member(rank)}")
        for block, holders in blocks.items():
            if len(holders) > 1:
                raise DesyncError(_message(step, block, sorted(holders.values(), key=len, reverse=True)))


def _message(step: int, block: str, holders: list[list[str]]) -> str:
    most, *others = holders
    apart = "; ".join(", ".join(names) for names in others)
    return (
        f"All replicas must hold the same values. Received before step {step}: {block} differs: {apart} from "
        f"{', '.join(most)}. Look for a machine with memory errors, or code that runs on some replicas alone; "
        "--resume=PATH goes on from a checkpoint of before."
    )


class GradientNorms(Inspection):
    """Logs the norm of each reduced gradient by rank, every so many steps; all ranks have the same, or reduction is wrong."""

    def __init__(self, site: Site, every: int):
        """Args: every: steps between two looks."""
        self._site = site
        self._every = every
        self._plan: dict[str, str] | None = None

    def next(self, step: int) -> int | None:
        """See base class."""
        return max(self._every, -(-step // self._every) * self._every)

    def look(self, step: int) -> dict[str, float]:
        """See base class; no fields."""
        steps = self._site.steps
        if self._plan != steps.overrides:
            self._plan = dict(steps.overrides)
            self._norms = Norms(steps.reducer())
            self._trial = steps.trial(self._site.batch_size, self._norms, read=lambda: self._norms.observed)
        _, _, observed = self._trial(self._site.batch(step), tf.constant(step, tf.int64))
        mine = [[float(value) for value in steps.strategy.local(norm)] for norm in observed]
        everyone = steps.strategy.group.gather("in_sync/norms", mine, TRIAL_SECONDS)
        if steps.strategy.is_chief:
            for i, spec in enumerate(steps.specs[:-1]):
                norms = [f"{value:.9g}" for rank in everyone for value in rank[i]]
                same = "" if len(set(norms)) == 1 else "  DIFFERENT"
                _log.info("step %d  gradient of %s  norm by replica: %s%s", step, spec.name, " ".join(norms), same)
        return {}


class Norms(Reducer):
    """Reduces with another reducer, and observes the norms of its sums.

    Attributes:
      observed: of the last call: scalars, one for each tensor.
    """

    def __init__(self, inner: Reducer):
        """Args: inner: the reducer."""
        self.inner = inner
        self.keeps_shapes = True
        self.observed: list[Any] = []

    def state(self, specs: Any) -> list[State]:
        """See base class."""
        return self.inner.state(specs)

    def reduce(self, tensors: Any, state: Any, collectives: Collectives, *, name: str) -> Reduced:
        """See base class."""
        reduced = self.inner.reduce(tensors, state, collectives, name=name)
        self.observed = [tf.norm(tf.cast(total, tf.float64)) for total in reduced.totals[:-1]]
        return reduced
