"""Parses `--sync`, the method of synchronizing replicas. Does not import TensorFlow."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

from tfdist.config.spec import call, parse, spec_of
from tfdist.errors import InputError
from tfdist.errors.formatting import is_integer, is_number, nearest

STATES = ("local", "averaged", "reset")
CLIENT_SIZES = ("equal", "power_law")
DEFAULT = "every_step"
_WORDS = ("state", "client_sizes")  # parameters whose values may be written without quotes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """A method of synchronizing replicas; the fields of subclasses are the parameters in the flag.

    Attributes:
      name: name of the method in the flag.
      exchanges_weights: whether replicas update local weights between exchanges.
      has_center: whether replicas keep local weights even during an exchange, and a center is evaluated instead.
      trains_clients: whether a step is a round of clients that train on the replicas.
      guide: page that explains the parameters.
    """

    name: ClassVar[str]
    exchanges_weights: ClassVar[bool] = True
    has_center: ClassVar[bool] = False
    trains_clients: ClassVar[bool] = False
    guide: ClassVar[str] = "docs/guides/local_sgd.md"

    def examples_per_step(self, size: int, batch_size: int) -> int:
        """Returns the number of examples per step, for a data set of `size` examples."""
        return batch_size

    @property
    def acts_on_one_replica(self) -> bool:
        """Whether an exchange changes the weights or optimizer state even with a single replica."""
        return self.has_center or self.trains_clients

    def groups(self, replicas: int) -> list[tuple[int, ...]]:
        """Returns the ranks of each communicating group, besides the group of all replicas."""
        return []

    def __str__(self) -> str:
        return str(spec_of(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryStep(Sync):
    """Sums gradients over replicas in every step."""

    name: ClassVar[str] = "every_step"
    exchanges_weights: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Periodic(Sync):
    """Base class: replicas train locally, and exchange weights every `period` steps.

    Attributes:
      period: number of steps between exchanges, at least 1.
    """

    period: int = 8

    def __post_init__(self) -> None:
        check_integer(self, "period", 1, "steps")

    @property
    def first_local_step(self) -> int:
        """The first step in which replicas train locally."""
        return 0

    @property
    def outer(self) -> str:
        """The optimizer of the global weights, whose gradient is the mean change of the local weights; "" for none."""
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaging(Periodic):
    """Base class: after an exchange, replicas continue from global weights, computed from the mean of the local ones.

    Attributes:
      state: the optimizer's state after an exchange: "local" keeps each replica's state, "averaged" takes the mean over
        replicas, and "reset" restores the initial state.
    """

    state: str = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "state", STATES)

    @property
    def acts_on_one_replica(self) -> bool:
        """See base class."""
        return bool(self.outer) or self.state == "reset"


def check_integer(sync: Sync, parameter: str, minimum: int, unit: str) -> None:
    """Raises `InputError` unless a parameter is an integer of at least `minimum`."""
    value = getattr(sync, parameter)
    if not is_integer(value) or value < minimum:
        raise invalid_parameter(sync, f"{parameter} must be a number of {unit} of at least {minimum}, not {value!r}")


def check_fraction(sync: Sync, parameter: str) -> None:
    """Raises `InputError` unless a parameter is a number above 0 and below 1."""
    value = getattr(sync, parameter)
    if not is_number(value) or not 0 < value < 1:
        raise invalid_parameter(sync, f"{parameter} must be a number above 0 and below 1, not {value!r}")


def check_choice(sync: Sync, parameter: str, choices: tuple[str, ...]) -> None:
    """Raises `InputError` unless a parameter is one of several words."""
    value = getattr(sync, parameter)
    if value not in choices:
        raise invalid_parameter(sync, f"{parameter} must be one of {', '.join(choices)}, not {value!r}")


def check_outer(sync: Sync, outer: str) -> None:
    """Raises `InputError` unless a parameter is an optimizer with its learning rate."""
    if not isinstance(outer, str):
        raise invalid_parameter(
            sync, f'outer must be an optimizer as a string, such as "sgd(learning_rate=1.0)", not {outer!r}'
        )
    if "learning_rate" not in parse(outer).args:
        raise invalid_parameter(sync, f'the outer optimizer needs its learning rate: outer="{outer}"')


def invalid_parameter(sync: Sync, problem: str) -> InputError:
    """Returns the error for an invalid parameter."""
    return InputError(f"{sync.name}: {problem}. {sync.guide} explains the parameters.")


def check_multiples(sync: Sync, parameter: str) -> None:
    """Raises `InputError` unless a parameter is a tuple of integers, each a larger multiple of its predecessor."""
    values = getattr(sync, parameter)
    if not isinstance(values, tuple) or not all(is_integer(value) and value >= 1 for value in values):
        raise invalid_parameter(sync, f"{parameter} must be numbers of at least 1, such as (4, 16), not {values!r}")
    if any(later <= earlier or later % earlier for earlier, later in itertools.pairwise(values)):
        raise invalid_parameter(sync, f"{parameter} must grow, each a multiple of the one before, not {values!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD(Averaging):
    """Replaces the local weights by their mean every `period` steps (Stich, arXiv:1805.09767).

    Attributes:
      overlap: whether an exchange runs during the next steps; the result depends only on `delay`.
      delay: number of steps until the exchanged weights are used; a replica's local progress in the meantime is added
        (Shen et al., arXiv:1906.12043). 0 for immediately or, with `overlap`, when the next exchange begins.
    """

    name: ClassVar[str] = "local_sgd"
    overlap: bool = False
    delay: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_delay()

    @property
    def fragment_count(self) -> int:
        """Number of fragments of the weights, exchanged one after the other."""
        return 1

    @property
    def lasts_until_next(self) -> bool:
        """Whether an exchange lasts until the next one begins, which keeps the link busy."""
        return self.overlap and not self.delay

    @property
    def is_delayed(self) -> bool:
        """Whether replicas continue to train before they use the exchanged weights."""
        return self.overlap or self.delay > 0

    def offsets(self, sizes: Sequence[int]) -> list[int]:
        """Returns the step of each fragment's exchange, relative to the first fragment's.

        Args:
          sizes: sizes of the fragments in bytes. If an exchange lasts until the next one, each fragment gets a share of the
            period in proportion to its size, because all then need the same bandwidth; otherwise, an equal share.
        """
        if not self.lasts_until_next:
            return [self.period * fragment // self.fragment_count for fragment in range(self.fragment_count)]
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return [
            fragment + round((self.period - self.fragment_count) * start / sum(sizes))
            for fragment, start in enumerate(starts)
        ]

    def delays(self, offsets: Sequence[int]) -> list[int]:
        """Returns the number of steps until each fragment is used, given the result of `offsets`."""
        if not self.lasts_until_next:
            return [self.delay] * self.fragment_count
        return [end - begin for begin, end in itertools.pairwise([*offsets, self.period])]

    @property
    def effective_mixing(self) -> float | None:
        """Fraction of its local weights that a replica keeps.

        None if a replica adds its progress since the last exchange to the global weights instead.
        """
        return None

    @property
    def is_blocking(self) -> bool:
        """Whether all weights are exchanged and replaced at the same step."""
        return self.fragment_count == 1 and not self.is_delayed and not self.effective_mixing

    def _check_delay(self) -> None:
        check_integer(self, "delay", 0, "steps")
        if not isinstance(self.overlap, bool):
            raise invalid_parameter(self, f"overlap must be True or False, not {self.overlap!r}")
        if self.fragment_count > self.period:
            raise invalid_parameter(
                self, f"fragments must be at most the period of {self.period} steps, not {self.fragment_count}"
            )
        max_delay = self.period // self.fragment_count
        if self.delay > max_delay:
            limit = "period / fragments" if self.fragment_count > 1 else "the period"
            raise invalid_parameter(self, f"delay must be at most {limit}, {max_delay} steps, not {self.delay!r}")
        if self.state != "local" and not self.is_blocking:
            raise invalid_parameter(self, f"state={self.state} needs exchanges of all weights at once: leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostLocalSGD(LocalSGD):
    """Sums gradients during a warmup, then runs local SGD (Lin et al., arXiv:1808.07217).

    Attributes:
      warmup_steps: number of steps with summed gradients.
    """

    name: ClassVar[str] = "post_local_sgd"
    warmup_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "warmup_steps", 0, "steps")

    @property
    def first_local_step(self) -> int:
        """See base class."""
        return self.warmup_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class HierarchicalLocalSGD(Averaging):
    """Local SGD at several levels: frequent means over small groups of replicas, rarer ones over larger groups.

    Like PyTorch's `HierarchicalModelAverager`: if several levels are due at a step, only the largest is exchanged.
    References: Lin et al., arXiv:1808.07217; Castiglia et al., arXiv:2007.13819.

    Attributes:
      periods: number of steps between exchanges, by level, from the smallest groups to all replicas; each is a multiple of
        its predecessor.
      group_sizes: number of consecutive replicas per group, by level except for the last, which has all replicas; each
        divides the next one and the number of replicas.
    """

    name: ClassVar[str] = "hierarchical_local_sgd"
    period: int = dataclasses.field(default=0, init=False)
    periods: tuple[int, ...] = (4, 16)
    group_sizes: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        for name in ("periods", "group_sizes"):
            check_multiples(self, name)
        if len(self.periods) != len(self.group_sizes) + 1 or not self.group_sizes:
            raise invalid_parameter(
                self,
                f"periods must have one more number than group_sizes, not {self.periods!r} and {self.group_sizes!r}",
            )
        object.__setattr__(self, "period", self.periods[-1])
        super().__post_init__()

    def groups(self, replicas: int) -> list[tuple[int, ...]]:
        """See base class.

        Raises:
          InputError: the replicas cannot be divided into groups of these sizes.
        """
        if replicas == 1:
            return []
        if replicas % self.group_sizes[-1] or self.group_sizes[-1] == replicas:
            raise invalid_parameter(
                self,
                f"group_sizes must divide the number of replicas, {replicas}, and be smaller, not {self.group_sizes!r}",
            )
        return [
            tuple(range(first_rank, first_rank + size))
            for size in self.group_sizes
            for first_rank in range(0, replicas, size)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """Updates the global weights by an outer optimizer every `period` steps (Douillard et al., arXiv:2311.08105).

    The outer gradient is the global weights minus the mean of the local weights. With sgd(learning_rate=1) this is local
    SGD; with adam, FedAdam.

    Attributes:
      outer: the outer optimizer, as in `--optimizer`, with its learning rate.
      fragments: number of parts of the weights, of about equal size. Part p is exchanged every `period` steps, `period *
        p // fragments` steps after the first (Streaming DiLoCo, Douillard et al., arXiv:2501.18512); see `offsets`.
      mixing: fraction of its local weights that a replica keeps when it receives the global ones, in [0, 1]. Defaults to
        0.5 with a delay, as in that paper, else 0.
    """

    name: ClassVar[str] = "diloco"
    period: int = 50
    outer: str = "sgd(momentum=0.9, nesterov=True, learning_rate=0.7)"
    fragments: int = 1
    mixing: float | None = None

    def __post_init__(self) -> None:
        check_integer(self, "fragments", 1, "parts")
        super().__post_init__()
        if self.mixing is not None and not (is_number(self.mixing) and 0 <= self.mixing <= 1):
            raise invalid_parameter(self, f"mixing must be a number from 0 to 1, not {self.mixing!r}")
        check_outer(self, self.outer)

    @property
    def fragment_count(self) -> int:
        """See base class."""
        return self.fragments

    @property
    def effective_mixing(self) -> float:
        """See base class."""
        return self.mixing if self.mixing is not None else 0.5 if self.is_delayed else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EASGD(Periodic):
    """Synchronous elastic averaging: replicas and a center attract each other (Zhang et al., arXiv:1412.6651).

    With a momentum optimizer, such as `--optimizer="sgd(momentum=0.9, nesterov=True)"`, it is EAMSGD.

    Attributes:
      period: see base class; 10 in the experiments of the paper.
      alpha: fraction of the distance to the center by which a replica moves in an exchange, in (0, 1). At most 1 / N with N
        replicas, which makes the center a mean of weights. Defaults to 0.9 / N.
    """

    name: ClassVar[str] = "easgd"
    has_center: ClassVar[bool] = True
    period: int = 10
    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None:
            check_fraction(self, "alpha")

    def effective_alpha(self, replicas: int) -> float:
        """Returns `alpha`, or its default for a number of replicas."""
        return 0.9 / replicas if self.alpha is None else self.alpha

    def check_alpha(self, replicas: int) -> None:
        """Raises `InputError` if `alpha` is larger than 1 / N."""
        alpha = self.effective_alpha(replicas)
        if alpha * replicas > 1:
            raise invalid_parameter(self, f"alpha must be at most 1/{replicas} with {replicas} replicas, not {alpha:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvg(Sync):
    """Federated averaging over virtual clients (McMahan et al., arXiv:1602.05629); a step is a round.

    The training data is divided among `clients`. In each round, m = max(1, round(fraction * clients)) of them are sampled.
    Each starts from the global weights x with a new optimizer, and makes `local_epochs` passes over its n_k examples in
    batches of `--batch_size` (the last batch may be smaller), resulting in weights w_k. Then

        d = sum over k of n_k (x - w_k) / sum over k of n_k,        x' = outer(x, d)

    Attributes:
      clients: number of clients, at least 1.
      fraction: fraction of the clients sampled in each round, in (0, 1].
      local_epochs: number of passes of a sampled client over its data, at least 1.
      shards_per_client: 0 divides the examples at random. Otherwise, the examples are sorted by class and split into shards,
        and each client gets this number of shards; most clients then have at most that many classes.
      client_sizes: "equal", or "power_law": client i has a number of examples proportional to 1 / i.
      proximal: factor mu of FedProx's term mu / 2 |w - x|^2 in a client's loss (Li et al., arXiv:1812.06127).
      outer: the optimizer of the global weights, as in `--optimizer`, with its learning rate (Reddi et al.,
        arXiv:2003.00295). The default is FedAvg: the weighted mean of the clients' weights.
    """

    name: ClassVar[str] = "fedavg"
    trains_clients: ClassVar[bool] = True
    guide: ClassVar[str] = "docs/guides/federated.md"

    clients: int = 100
    fraction: float = 0.1
    local_epochs: int = 1
    shards_per_client: int = 0
    client_sizes: str = "equal"
    proximal: float = 0.0
    outer: str = "sgd(learning_rate=1.0)"

    def __post_init__(self) -> None:
        check_integer(self, "clients", 1, "clients")
        check_integer(self, "local_epochs", 1, "epochs")
        check_integer(self, "shards_per_client", 0, "shards")
        check_choice(self, "client_sizes", CLIENT_SIZES)
        if not is_number(self.fraction) or not 0 < self.fraction <= 1:
            raise invalid_parameter(self, f"fraction must be a number in (0, 1], not {self.fraction!r}")
        if not is_number(self.proximal) or not 0 <= self.proximal < float("inf"):
            raise invalid_parameter(self, f"proximal must be a number of at least 0, not {self.proximal!r}")
        check_outer(self, self.outer)

    @property
    def clients_per_round(self) -> int:
        """Number of clients that train in a round."""
        return max(1, round(self.fraction * self.clients))

    def examples_per_step(self, size: int, batch_size: int) -> int:
        """See base class; returns the mean number of examples per round."""
        return max(1, round(size * self.local_epochs * self.clients_per_round / self.clients))


SYNCS: dict[str, type[Sync]] = {
    kind.name: kind
    for kind in (
        EveryStep,
        LocalSGD,
        PostLocalSGD,
        HierarchicalLocalSGD,
        DiLoCo,
        EASGD,
        FedAvg,
    )
}


def parse_sync(text: str) -> Sync:
    """Parses the value of `--sync`, such as `local_sgd(period=8)`.

    Raises:
      InputError: the name or a parameter is unknown or out of range.
    """
    spec = parse(text, _WORDS)
    if spec.name not in SYNCS:
        raise InputError(f"{spec.name} is not a known synchronization method.{nearest(spec.name, SYNCS)}")
    sync: Sync = call(SYNCS[spec.name], spec)
    return sync
