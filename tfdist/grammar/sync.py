"""Parses `--sync`: how often replicas exchange their weights, and how. Does not import TensorFlow."""

import dataclasses
import math
import operator
from typing import Any, ClassVar

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer, is_number
from tfdist.grammar.spec import call, nearest, parse

STATES = ("local", "averaged", "reset")
_WORDS = ("state", "rule")  # may be without quotes
DEFAULT = "every_step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """How replicas are kept in agreement; the fields of subclasses are the parameters in the flag.

    Attributes:
      is_local: whether each replica updates weights of its own between exchanges.
      has_center: whether replicas keep weights of their own also in an exchange, so that a center is evaluated.
    """

    is_local: ClassVar[bool] = True
    has_center: ClassVar[bool] = False

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
class Periodic(Sync):
    """Replicas train alone, and exchange weights every `period` steps.

    Attributes:
      period: number of steps between exchanges, at least 1.
    """

    period: int = 8

    def __post_init__(self) -> None:
        """Validates the parameters."""
        check_integer(self, "period", 1, "steps")

    @property
    def local_from(self) -> int:
        """The step from which on replicas train alone."""
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EASGD(Periodic):
    """Elastic averaging: replicas and a center attract each other (Zhang et al., arXiv:1412.6651), synchronous.

    With a momentum optimizer on each replica, as `--optimizer="sgd(momentum=0.9, nesterov=True)"`, it is EAMSGD.

    Attributes:
      period: see base class; 10 in the experiments of the paper.
      alpha: fraction of its distance to the center by which a replica moves in an exchange, in (0, 1); None for 0.9 / N
        with N replicas. At most 1 / N, so that the center remains a mean of weights.
    """

    has_center: ClassVar[bool] = True
    period: int = 10
    alpha: float | None = None

    def __post_init__(self) -> None:
        """Validates the parameters."""
        super().__post_init__()
        if self.alpha is not None:
            check_number(self, "alpha", above=0, below=1)

    def alpha_of(self, replicas: int) -> float:
        """Returns `alpha` for a number of replicas.

        Raises:
          InputError: it is larger than 1 / N.
        """
        alpha = 0.9 / replicas if self.alpha is None else self.alpha
        if alpha * replicas > 1:
            raise _wrong(self, f"alpha must be at most 1/{replicas} with {replicas} replicas, not {alpha:g}")
        return alpha


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaging(Periodic):
    """In an exchange, replicas go on with global weights, which are made of the mean of their own.

    Attributes:
      state: what happens to the optimizer's state in an exchange: "local" leaves each replica its own, "averaged"
        replaces it by its mean, "reset" by its initial value.
    """

    state: str = "local"

    def __post_init__(self) -> None:
        """Validates the parameters."""
        super().__post_init__()
        check_choice(self, "state", STATES)

    @property
    def outer(self) -> str:
        """The optimizer of the global weights, whose gradient is the mean of what replicas have changed; "" for none."""
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD(Averaging):
    """Every `period` steps, the replicas' weights are replaced by their mean (Stich, arXiv:1805.09767).

    Attributes:
      overlap: whether an exchange runs beside the next steps; the result depends only on `delay`.
      delay: number of steps after which what was sent is used. What a replica has learned since is added to it (Shen et
        al., arXiv:1906.12043). 0: at once; with `overlap`, as late as the next exchange allows.
    """

    overlap: bool = False
    delay: int = 0

    def __post_init__(self) -> None:
        """Validates the parameters."""
        super().__post_init__()
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowMo(Averaging):
    """Slow momentum: the global weights have a momentum of their own (Wang et al., arXiv:1910.00643).

    With momentum=0 and learning_rate=1 it is local SGD. What the paper calls the buffer strategies reset, maintain and
    average is `state`.

    Attributes:
      period: see base class; 12 in the paper's experiments with CIFAR-10, 48 with ImageNet.
      momentum: factor of the slow momentum in each exchange, in [0, 1).
      learning_rate: the slow learning rate, above 0.
    """

    period: int = 12
    momentum: float = 0.7
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        """Validates the parameters."""
        super().__post_init__()
        check_number(self, "momentum", least=0, below=1)
        check_number(self, "learning_rate", above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(Averaging):
    """Local SGD with a period that a rule changes; see `tfdist.synchronization.period_rules` for the equations.

    Attributes:
      rule: "adacomm" (Wang and Joshi, arXiv:1810.08313), which shortens the period as the loss falls; "qsr" (Gu et al.,
        arXiv:2310.14423), which lengthens it as the learning rate falls; or "divergence" (Jiang and Agrawal,
        arXiv:2007.06134), which holds the distance between replicas at a target.
      period: the first period; with qsr, the shortest.
      max_period: the longest period.
      interval: of adacomm: number of steps between decisions, at least 1.
      alpha: of qsr, required: the period is (alpha / learning rate) squared.
      target: of divergence: `replica_divergence` to hold; None for that of the first exchanges, in proportion to the
        learning rate.
    """

    rule: str
    max_period: int = 1000
    interval: int = 100
    alpha: float | None = None
    target: float | None = None

    def __post_init__(self) -> None:
        """Validates the parameters."""
        super().__post_init__()
        check_choice(self, "rule", tuple(_OF_RULE))
        check_integer(self, "max_period", self.period, "steps")
        check_integer(self, "interval", 1, "steps")
        for rule, parameter in _OF_RULE.items():
            default = next(field.default for field in dataclasses.fields(self) if field.name == parameter)
            if rule != self.rule and getattr(self, parameter) != default:
                raise _wrong(self, f"{parameter} is for rule={rule}, not for rule={self.rule}")
        if self.rule == "qsr" and self.alpha is None:
            raise _wrong(self, "rule=qsr needs alpha, such as alpha=0.2: the period is (alpha / learning rate) squared")
        for parameter in ("alpha", "target"):
            if getattr(self, parameter) is not None:
                check_number(self, parameter, above=0)


_OF_RULE = {"adacomm": "interval", "qsr": "alpha", "divergence": "target"}  # the parameter that only this rule has

SYNCS: dict[str, type[Sync]] = {
    "every_step": EveryStep,
    "local_sgd": LocalSGD,
    "post_local_sgd": PostLocalSGD,
    "diloco": DiLoCo,
    "easgd": EASGD,
    "slowmo": SlowMo,
    "adaptive": Adaptive,
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


def check_number(sync: Sync, parameter: str, **bounds: float) -> None:
    """Raises `InputError` unless a parameter is a finite number within bounds, by name: "above", "least" or "below"."""
    value, compare = getattr(sync, parameter), {"above": operator.gt, "least": operator.ge, "below": operator.lt}
    if not is_number(value) or not math.isfinite(value) or not all(compare[k](value, b) for k, b in bounds.items()):
        words = {"above": "above", "least": "of at least", "below": "below"}
        said = " and ".join(f"{words[name]} {bound:g}" for name, bound in bounds.items())
        raise _wrong(sync, f"{parameter} must be a number {said}, not {value!r}")


def check_choice(sync: Sync, parameter: str, choices: tuple[str, ...]) -> None:
    """Raises `InputError` unless a parameter is one of several words."""
    value = getattr(sync, parameter)
    if value not in choices:
        raise _wrong(sync, f"{parameter} must be one of {', '.join(choices)}, not {value!r}")


def _wrong(sync: Sync, problem: str) -> InputError:
    name: Any = name_of(sync)
    return InputError(f"--sync={name}: {problem}. docs/guides/local_sgd.md explains the parameters.")
