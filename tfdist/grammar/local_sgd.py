"""Parameters of local SGD and of what extends it: warmup, levels, an outer optimizer. Does not import TensorFlow."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

from tfdist.errors.number_checks import is_number
from tfdist.grammar.sync_base import Averaging, check_integer, check_multiples, check_outer, invalid_parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD(Averaging):
    """Every `period` steps, the replicas' weights are replaced by their mean (Stich, arXiv:1805.09767).

    Attributes:
      overlap: whether an exchange runs during the next steps; the result depends only on `delay`.
      delay: number of steps after which what was sent is used. What a replica has learned since is added to it (Shen et
        al., arXiv:1906.12043). 0: at once; with `overlap`, when the next exchange begins.
    """

    name: ClassVar[str] = "local_sgd"
    overlap: bool = False
    delay: int = 0

    def __post_init__(self) -> None:
        """Validates the parameters."""
        super().__post_init__()
        self._check_delay()

    @property
    def fragment_count(self) -> int:
        """Number of fragments of the weights, which are exchanged one after the other."""
        return 1

    @property
    def lasts_until_next(self) -> bool:
        """Whether what was sent is used when the next exchange begins, so that a link is never idle."""
        return self.overlap and not self.delay

    @property
    def is_delayed(self) -> bool:
        """Whether replicas train on before what was sent is used."""
        return self.overlap or self.delay > 0

    def offsets(self, sizes: Sequence[int]) -> list[int]:
        """Returns for each fragment the number of steps between the first one's exchange and its own.

        Args:
          sizes: the fragments' numbers of bytes. If an exchange lasts until the next one, a fragment has a part of the
            period in proportion to its size, so that all need the same speed of the link; otherwise an equal part.
        """
        if not self.lasts_until_next:
            return [self.period * p // self.fragment_count for p in range(self.fragment_count)]
        before = itertools.accumulate(sizes[:-1], initial=0)
        return [p + round((self.period - self.fragment_count) * part / sum(sizes)) for p, part in enumerate(before)]

    def delays(self, offsets: Sequence[int]) -> list[int]:
        """Returns the number of steps after which each fragment is used, given the result of `offsets`."""
        if not self.lasts_until_next:
            return [self.delay] * self.fragment_count
        return [end - begin for begin, end in itertools.pairwise([*offsets, self.period])]

    @property
    def effective_mixing(self) -> float | None:
        """Fraction of its own weights that a replica keeps; None: it adds its progress since sending to the global ones."""
        return None

    @property
    def is_blocking(self) -> bool:
        """Whether all weights are exchanged at the same step, and replaced at once."""
        return self.fragment_count == 1 and not self.is_delayed and not self.effective_mixing

    def _check_delay(self) -> None:
        """Validates the parameters of exchanges that take time."""
        check_integer(self, "delay", 0, "steps")
        if not isinstance(self.overlap, bool):
            raise invalid_parameter(self, f"overlap must be True or False, not {self.overlap!r}")
        if self.fragment_count > self.period:
            raise invalid_parameter(
                self, f"fragments must be at most the period of {self.period} steps, not {self.fragment_count}"
            )
        longest = self.period // self.fragment_count
        if self.delay > longest:
            each = "period / fragments" if self.fragment_count > 1 else "the period"
            raise invalid_parameter(self, f"delay must be at most {each}, {longest} steps, not {self.delay!r}")
        if self.state != "local" and not self.is_blocking:
            raise invalid_parameter(self, f"state={self.state} needs exchanges of all weights at once: leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostLocalSGD(LocalSGD):
    """Gradients are summed in every step at first, then local SGD (Lin et al., arXiv:1808.07217).

    Attributes:
      warmup_steps: number of steps with summed gradients.
    """

    name: ClassVar[str] = "post_local_sgd"
    warmup_steps: int

    def __post_init__(self) -> None:
        """Validates the parameters."""
        super().__post_init__()
        check_integer(self, "warmup_steps", 0, "steps")

    @property
    def first_local_step(self) -> int:
        """See base class."""
        return self.warmup_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class HierarchicalLocalSGD(Averaging):
    """Local SGD at several levels: frequent means among a few replicas, rarer ones among more.

    As PyTorch's `HierarchicalModelAverager`: of several levels that are due at a step, only the largest is exchanged.
    References: Lin et al., arXiv:1808.07217; Castiglia et al., arXiv:2007.13819.

    Attributes:
      periods: number of steps between the exchanges of each level, from the smallest groups to all replicas; each is a
        multiple of the one before.
      group_sizes: number of consecutive replicas in a group of each level but the last, which has all; each divides the next,
        and all replicas.
    """

    name: ClassVar[str] = "hierarchical_local_sgd"
    period: int = dataclasses.field(default=0, init=False)
    periods: tuple[int, ...] = (4, 16)
    group_sizes: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        """Validates the parameters."""
        for name in ("periods", "group_sizes"):
            check_multiples(self, name)
        if len(self.periods) != len(self.group_sizes) + 1 or not self.group_sizes:
            raise invalid_parameter(
                self,
                f"periods must have one number more than group_sizes, not {self.periods!r} and {self.group_sizes!r}",
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
        return [tuple(range(first, first + size)) for size in self.group_sizes for first in range(0, replicas, size)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """An outer optimizer updates the global weights every `period` steps (Douillard et al., arXiv:2311.08105).

    Its gradient is the global weights minus the mean of the replicas' weights. With sgd(learning_rate=1) it is local
    SGD; with adam, FedAdam.

    Attributes:
      outer: the outer optimizer, as in `--optimizer`, with its learning rate.
      fragments: number of parts of the weights, of about equal size. Part p is exchanged every `period` steps, `period *
        p // fragments` steps after the first (Streaming DiLoCo, Douillard et al., arXiv:2501.18512); see `offsets`.
      mixing: fraction of its own weights that a replica keeps when it receives the global ones, from 0 to 1. None: 0.5
        with a delay, as in that paper, else 0.
    """

    name: ClassVar[str] = "diloco"
    period: int = 50
    outer: str = "sgd(momentum=0.9, nesterov=True, learning_rate=0.7)"
    fragments: int = 1
    mixing: float | None = None

    def __post_init__(self) -> None:
        """Validates the parameters."""
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
