"""Parses `--sync`, the method of synchronizing replicas. Does not import TensorFlow."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

from tfdist.config.parameters import REQUIRED, Parameters, boolean, choice, integer, number, parameter, parse_kind
from tfdist.config.spec import parse
from tfdist.errors import is_integer

STATES = ("local", "averaged", "reset")
CLIENT_SIZES = ("equal", "power_law")
DEFAULT = "every_step"


_MULTIPLES = "numbers of at least 1, each a larger multiple of the previous one, such as (4, 16)"


def _are_multiples(values: Any) -> bool:
    are_numbers = isinstance(values, tuple) and bool(values) and all(is_integer(x) and x >= 1 for x in values)
    return are_numbers and all(
        later > earlier and later % earlier == 0 for earlier, later in itertools.pairwise(values)
    )


def _outer(default: str) -> Any:
    return parameter(
        default,
        lambda outer: isinstance(outer, str) and "learning_rate" in parse(outer).args,
        'an optimizer with its learning rate, such as "sgd(learning_rate=1.0)"',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync(Parameters):
    """A method of synchronizing replicas; the fields of subclasses are the parameters in the flag."""

    exchanges_weights: ClassVar[bool] = True  # whether replicas update local weights between exchanges
    # Whether replicas keep local weights even during an exchange, and a center is evaluated instead.
    has_center: ClassVar[bool] = False
    trains_clients: ClassVar[bool] = False  # whether a step is a round of clients that train on the replicas
    guide: ClassVar[str] = "docs/guides/local_sgd.md"

    def examples_per_step(self, size: int, batch_size: int) -> int:
        """Returns the number of examples per step, for a dataset of `size` examples."""
        return batch_size

    @property
    def acts_on_one_replica(self) -> bool:
        """Whether an exchange changes the weights or optimizer state even with a single replica."""
        return self.has_center or self.trains_clients

    def groups(self, replicas: int) -> list[tuple[int, ...]]:
        """Returns the ranks of each communicating group, besides the group of all replicas."""
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryStep(Sync):
    """Sums gradients over replicas in every step."""

    name: ClassVar[str] = "every_step"
    exchanges_weights: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Periodic(Sync):
    """Base class: replicas train locally, and exchange weights every `period` steps."""

    period: int = integer(8, 1, "steps")  # number of steps between exchanges, at least 1

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
    """Base class: after an exchange, replicas continue from global weights, computed from the mean of local ones."""

    # The optimizer's state after an exchange: "local" keeps each replica's state, "averaged" takes the mean over
    # replicas, and "reset" restores the initial state.
    state: str = choice("local", STATES)

    @property
    def acts_on_one_replica(self) -> bool:
        return bool(self.outer) or self.state == "reset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD(Averaging):
    """Replaces the local weights by their mean every `period` steps (Stich, arXiv:1805.09767)."""

    name: ClassVar[str] = "local_sgd"
    overlap: bool = boolean(False)  # whether an exchange runs during the next steps; the result depends only on `delay`
    # Number of steps until the exchanged weights are used; a replica's local progress in the meantime is added (Shen et
    # al., arXiv:1906.12043). 0 for immediately or, with `overlap`, when the next exchange begins.
    delay: int = integer(0, 0, "steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fragment_count > self.period:
            raise self.invalid(f"fragments must be at most the period of {self.period} steps", self.fragment_count)
        max_delay = self.period // self.fragment_count
        if self.delay > max_delay:
            limit = "period / fragments" if self.fragment_count > 1 else "the period"
            raise self.invalid(f"delay must be at most {limit}, {max_delay} steps", self.delay)
        if self.state != "local" and not self.is_blocking:
            raise self.invalid("state must be local if weights are not exchanged all at once", self.state)

    @property
    def fragment_count(self) -> int:
        """Number of fragments of the weights, exchanged one after the other."""
        return 1

    @property
    def lasts_until_next_exchange(self) -> bool:
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
        if not self.lasts_until_next_exchange:
            return [self.period * fragment // self.fragment_count for fragment in range(self.fragment_count)]
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return [
            fragment + round((self.period - self.fragment_count) * start / sum(sizes))
            for fragment, start in enumerate(starts)
        ]

    def delays(self, offsets: Sequence[int]) -> list[int]:
        """Returns the number of steps until each fragment is used, given the result of `offsets`."""
        if not self.lasts_until_next_exchange:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostLocalSGD(LocalSGD):
    """Sums gradients during a warmup, then runs local SGD (Lin et al., arXiv:1808.07217)."""

    name: ClassVar[str] = "post_local_sgd"
    warmup_steps: int = integer(REQUIRED, 0, "steps")  # number of steps with summed gradients

    @property
    def first_local_step(self) -> int:
        return self.warmup_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class HierarchicalLocalSGD(Averaging):
    """Local SGD at several levels: frequent means over small groups of replicas, less frequent ones over larger groups.

    Like PyTorch's `HierarchicalModelAverager`: if several levels are due at a step, only the largest is exchanged.
    References: Lin et al., arXiv:1808.07217; Castiglia et al., arXiv:2007.13819.
    """

    name: ClassVar[str] = "hierarchical_local_sgd"
    period: int = dataclasses.field(default=0, init=False)
    # Number of steps between exchanges, by level, from the smallest groups to all replicas; each is a multiple of its
    # predecessor.
    periods: tuple[int, ...] = parameter((4, 16), _are_multiples, _MULTIPLES)
    # Number of consecutive replicas per group, by level except for the last, which has all replicas; each divides the
    # next one and the number of replicas.
    group_sizes: tuple[int, ...] = parameter((2,), _are_multiples, _MULTIPLES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.periods) != len(self.group_sizes) + 1:
            raise self.invalid("periods must have one more number than group_sizes", (self.periods, self.group_sizes))
        object.__setattr__(self, "period", self.periods[-1])

    def groups(self, replicas: int) -> list[tuple[int, ...]]:
        """See base class.

        Raises:
          InputError: the replicas cannot be divided into groups of these sizes.
        """
        if replicas == 1:
            return []
        if replicas % self.group_sizes[-1] or self.group_sizes[-1] == replicas:
            raise self.invalid(
                f"group_sizes must divide the number of replicas, {replicas}, and be smaller", self.group_sizes
            )
        return [
            tuple(range(first_rank, first_rank + size))
            for size in self.group_sizes
            for first_rank in range(0, replicas, size)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """Updates the global weights with an outer optimizer every `period` steps (Douillard et al., arXiv:2311.08105).

    The outer gradient is the global weights minus the mean of the local weights. With sgd(learning_rate=1) this is local
    SGD; with adam, FedAdam.
    """

    name: ClassVar[str] = "diloco"
    period: int = integer(50, 1, "steps")
    # The outer optimizer, as in `--optimizer`, with its learning rate.
    outer: str = _outer("sgd(momentum=0.9, nesterov=True, learning_rate=0.7)")
    # Number of parts of the weights, of about equal size. Part p is exchanged every `period` steps, `period * p //
    # fragments` steps after the first (Streaming DiLoCo, Douillard et al., arXiv:2501.18512); see `offsets`.
    fragments: int = integer(1, 1, "parts")
    # Fraction of its local weights that a replica keeps when it receives the global ones, in [0, 1]. Defaults to 0.5
    # with a delay, as in that paper, else 0.
    mixing: float | None = number(None, "[0, 1]")

    @property
    def fragment_count(self) -> int:
        return self.fragments

    @property
    def effective_mixing(self) -> float:
        return self.mixing if self.mixing is not None else 0.5 if self.is_delayed else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EASGD(Periodic):
    """Synchronous elastic averaging: replicas and a center attract each other (Zhang et al., arXiv:1412.6651).

    With a momentum optimizer, such as `--optimizer="sgd(momentum=0.9, nesterov=True)"`, it is EAMSGD.
    """

    name: ClassVar[str] = "easgd"
    has_center: ClassVar[bool] = True
    period: int = integer(10, 1, "steps")  # see base class; 10 in the experiments of the paper
    # Fraction of the distance to the center by which a replica moves in an exchange, in (0, 1). At most 1 / N with N
    # replicas, which makes the center a mean of weights. Defaults to 0.9 / N.
    alpha: float | None = number(None, "(0, 1)")

    def effective_alpha(self, replicas: int) -> float:
        """Returns `alpha`, or its default for a number of replicas."""
        return 0.9 / replicas if self.alpha is None else self.alpha

    def check_alpha(self, replicas: int) -> None:
        """Raises `InputError` if `alpha` is larger than 1 / N."""
        alpha = self.effective_alpha(replicas)
        if alpha * replicas > 1:
            raise self.invalid(f"alpha must be at most 1/{replicas} with {replicas} replicas", alpha)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvg(Sync):
    """Federated averaging over virtual clients (McMahan et al., arXiv:1602.05629); a step is a round.

    The training data is divided among `clients`. In each round, m = max(1, round(fraction * clients)) of them are sampled.
    Each starts from the global weights x with a new optimizer, and makes `local_epochs` passes over its n_k examples in
    batches of `--batch_size` (the last batch may be smaller), resulting in weights w_k. Then

        d = sum over k of n_k (x - w_k) / sum over k of n_k,        x' = outer(x, d)
    """

    name: ClassVar[str] = "fedavg"
    trains_clients: ClassVar[bool] = True
    guide: ClassVar[str] = "docs/guides/federated.md"

    clients: int = integer(100, 1, "clients")  # number of clients, at least 1
    fraction: float = number(0.1, "(0, 1]")  # fraction of the clients sampled in each round, in (0, 1]
    local_epochs: int = integer(1, 1, "epochs")  # number of passes of a sampled client over its data, at least 1
    # 0 divides the examples at random. Otherwise, the examples are sorted by class and split into shards, and each
    # client gets this number of shards; most clients then have at most that many classes.
    shards_per_client: int = integer(0, 0, "shards")
    # "equal", or "power_law": client i has a number of examples proportional to 1 / i.
    client_sizes: str = choice("equal", CLIENT_SIZES)
    # Factor mu of FedProx's term mu / 2 |w - x|^2 in a client's loss (Li et al., arXiv:1812.06127).
    proximal: float = number(0.0, "[0, inf)")
    # The optimizer of the global weights, as in `--optimizer`, with its learning rate (Reddi et al., arXiv:2003.00295).
    # The default is FedAvg: the weighted mean of the clients' weights.
    outer: str = _outer("sgd(learning_rate=1.0)")

    @property
    def clients_per_round(self) -> int:
        """Number of clients that train in a round."""
        return max(1, round(self.fraction * self.clients))

    def examples_per_step(self, size: int, batch_size: int) -> int:
        """See base class; returns the mean number of examples per round."""
        return max(1, round(size * self.local_epochs * self.clients_per_round / self.clients))


SYNCS: dict[str, type[Sync]] = {
    kind.name: kind for kind in (EveryStep, LocalSGD, PostLocalSGD, HierarchicalLocalSGD, DiLoCo, EASGD, FedAvg)
}


def parse_sync(text: str) -> Sync:
    """Parses the value of `--sync`, such as `local_sgd(period=8)`."""
    return parse_kind(text, SYNCS, "synchronization method", words=("state", "client_sizes"))
