"""Parses `--sync`: how often replicas exchange their weights, and how. Does not import TensorFlow."""

import dataclasses
from typing import Any, ClassVar

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer, is_number
from tfdist.grammar.spec import call, nearest, parse

STATES = ("local", "averaged", "reset")
_WORDS = ("state",)  # may be without quotes
DEFAULT = "every_step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """How replicas are kept in agreement; the fields of subclasses are the parameters in the flag.

    Attributes:
      is_local: whether each replica updates weights of its own between exchanges.
    """

    is_local: ClassVar[bool] = True

    def __str__(self) -> str:
        """Returns a text that `parse_sync` converts to an equal value."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{name_of(self)}({arguments})" if given else name_of(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryStep(Sync):
    """Gradients are summed over replicas in every step."""

    is_local: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD(Sync):
    """Every `period` steps, the replicas' weights are replaced by their mean (Stich, arXiv:1805.09767).

    Attributes:
      period: number of steps between exchanges, at least 1.
      state: what happens to the optimizer's state in an exchange: "local" leaves each replica its own, "averaged"
        replaces it by its mean, "reset" by its initial value.
      overlap: whether an exchange runs beside the next steps; the result depends only on `delay`.
      delay: number of steps after which what was sent is used. What a replica has learned since is added to it (Shen et
        al., arXiv:1906.12043). 0: at once; with `overlap`, as late as the next exchange allows.
    """

    period: int = 8
    state: str = "local"
    overlap: bool = False
    delay: int = 0

    def __post_init__(self) -> None:
        """Validates the parameters."""
        check_integer(self, "period", 1, "steps")
        check_choice(self, "state", STATES)
        self._check_delay()

    @property
    def parts(self) -> int:
        """Number of fragments of the weights, which are exchanged one after the other."""
        return 1

    @property
    def used_after(self) -> int:
        """Number of steps after which what was sent is used."""
        return self.delay or (max(1, self.period // self.parts - 1) if self.overlap else 0)

    @property
    def kept_share(self) -> float | None:
        """Share of a replica's own weights in those with which it goes on; None: it keeps its progress since sending."""
        return None

    @property
    def is_blocking(self) -> bool:
        """Whether all weights are exchanged at the same step, and replaced at once."""
        return self.parts == 1 and not self.used_after and not self.kept_share

    def _check_delay(self) -> None:
        """Validates the parameters of exchanges that take time."""
        check_integer(self, "delay", 0, "steps")
        if not isinstance(self.overlap, bool):
            raise _wrong(self, f"overlap must be True or False, not {self.overlap!r}")
        if self.parts > self.period:
            raise _wrong(self, f"fragments must be at most the period of {self.period} steps, not {self.parts}")
        longest = self.period // self.parts
        if self.delay > longest:
            each = "period / fragments" if self.parts > 1 else "the period"
            raise _wrong(self, f"delay must be at most {each}, {longest} steps, not {self.delay!r}")
        if self.state != "local" and not self.is_blocking:
            raise _wrong(self, f"state={self.state} needs exchanges of all weights at once: leave it out")

    @property
    def local_from(self) -> int:
        """The step from which on replicas train alone."""
        return 0

    @property
    def outer(self) -> str:
        """The optimizer of the global weights, whose gradient is the mean of what replicas have changed; "" for none."""
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostLocalSGD(LocalSGD):
    """Gradients are summed in every step at first, then local SGD (Lin et al., arXiv:1808.07217).

    Attributes:
      warmup_steps: number of steps with summed gradients.
    """

    warmup_steps: int

    def __post_init__(self) -> None:
        """Validates the parameters."""
        super().__post_init__()
        check_integer(self, "warmup_steps", 0, "steps")

    @property
    def local_from(self) -> int:
        """See base class."""
        return self.warmup_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """An outer optimizer updates the global weights every `period` steps (Douillard et al., arXiv:2311.08105).

    Its gradient is the global weights minus the mean of the replicas' weights. With sgd(learning_rate=1) it is local
    SGD; with adam, FedAdam.

    Attributes:
      outer: the outer optimizer, as in `--optimizer`, with its learning rate.
      fragments: number of parts of the weights, of about equal size. Part p is exchanged every `period` steps, `period *
        p // fragments` steps after the first (Streaming DiLoCo, Douillard et al., arXiv:2501.18512).
      mixing: share of a replica's own weights in those with which it goes on when it receives the global ones, from 0 to
        1. None: 0.5 with a delay, as in that paper, else 0.
    """

    period: int = 50
    outer: str = "sgd(momentum=0.9, nesterov=True, learning_rate=0.7)"
    fragments: int = 1
    mixing: float | None = None

    def __post_init__(self) -> None:
        """Validates the parameters."""
        check_integer(self, "fragments", 1, "parts")
        super().__post_init__()
        if self.mixing is not None and not (is_number(self.mixing) and 0 <= self.mixing <= 1):
            raise _wrong(self, f"mixing must be a number from 0 to 1, not {self.mixing!r}")
        if not isinstance(self.outer, str):
            raise _wrong(
                self, f'outer must be an optimizer as a text, such as "sgd(learning_rate=1.0)", not {self.outer!r}'
            )
        if "learning_rate" not in parse(self.outer).args:
            raise _wrong(self, f'the outer optimizer needs its learning rate: outer="{self.outer}"')

    @property
    def parts(self) -> int:
        """See base class."""
        return self.fragments

    @property
    def kept_share(self) -> float:
        """See base class."""
        return self.mixing if self.mixing is not None else 0.5 if self.used_after else 0.0


SYNCS: dict[str, type[Sync]] = {
    "every_step": EveryStep,
    "local_sgd": LocalSGD,
    "post_local_sgd": PostLocalSGD,
    "diloco": DiLoCo,
}


def parse_sync(text: str) -> Sync:
    """Parses the value of `--sync`, such as `local_sgd(period=8)`.

    Raises:
      InputError: the name or a parameter is unknown or out of range.
    """
    spec = parse(text, _WORDS)
    if spec.name not in SYNCS:
        raise InputError(f"--sync={spec.name} is not known.{nearest(spec.name, SYNCS)}")
    found: Sync = call(SYNCS[spec.name], spec)
    return found


def name_of(sync: Sync) -> str:
    """Returns the name of a method in the flag."""
    return next(name for name, kind in SYNCS.items() if kind is type(sync))


def check_integer(sync: Sync, parameter: str, least: int, unit: str) -> None:
    """Raises `InputError` unless a parameter is an integer of at least `least`."""
    value = getattr(sync, parameter)
    if not is_integer(value) or value < least:
        raise _wrong(sync, f"{parameter} must be a number of {unit} of at least {least}, not {value!r}")


def check_choice(sync: Sync, parameter: str, choices: tuple[str, ...]) -> None:
    """Raises `InputError` unless a parameter is one of several words."""
    value = getattr(sync, parameter)
    if value not in choices:
        raise _wrong(sync, f"{parameter} must be one of {', '.join(choices)}, not {value!r}")


def _wrong(sync: Sync, problem: str) -> InputError:
    name: Any = name_of(sync)
    return InputError(f"--sync={name}: {problem}. docs/guides/local_sgd.md explains the parameters.")
