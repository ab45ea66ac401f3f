"""Parses `--decay`, the learning-rate schedule. Does not import TensorFlow."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import ClassVar

from tfdist.config.monitor import MODES
from tfdist.config.spec import Spec, call, parse
from tfdist.errors import InputError
from tfdist.errors.formatting import is_integer, is_number, nearest

ANNEALS = ("cosine", "linear")
_MIN_T_MUL = 1.1  # smaller values give too many cycles to tabulate
_WORDS = ("monitor", "mode", "anneal")  # parameters whose values may be written without quotes


class Decay:
    """Base class of learning-rate schedules; the fields of subclasses are the parameters in the flag.

    Attributes:
      warmup_conflict: why a warmup is not supported, as a clause; empty if it is supported.
    """

    warmup_conflict: ClassVar[str] = ""

    @property
    def needs_total_steps(self) -> bool:
        """Whether the schedule depends on the number of steps of the run."""
        return False


@dataclasses.dataclass(frozen=True)
class NoDecay(Decay):
    """A constant learning rate."""


@dataclasses.dataclass(frozen=True)
class FinalRateDecay(Decay):
    """A decay from the end of the warmup to the end of the run.

    Attributes:
      to: final learning rate as a fraction of the peak, in [0, 1].
    """

    to: float = 0.0

    def __post_init__(self) -> None:
        _check_number(type(self).__name__.lower(), "to", self.to, 0, 1)

    @property
    def needs_total_steps(self) -> bool:
        """See base class."""
        return True


@dataclasses.dataclass(frozen=True)
class Cosine(FinalRateDecay):
    """Cosine decay (Loshchilov and Hutter, arXiv:1608.03983)."""


@dataclasses.dataclass(frozen=True)
class Linear(FinalRateDecay):
    """Linear decay."""


@dataclasses.dataclass(frozen=True)
class Polynomial(FinalRateDecay):
    """Polynomial decay: the part of the rate above the final one is (1 - progress) to a power.

    Attributes:
      power: above 0; 1 is linear.
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("polynomial", "power", self.power, 1e-6, 1e6)


@dataclasses.dataclass(frozen=True)
class Exponential(Decay):
    """Exponential decay at every step.

    Attributes:
      factor: fraction of the rate that remains after `every` steps, in (0, 1].
      every: number of steps, counted from the end of the warmup; 0 for all steps up to the end of the run.
    """

    factor: float = 0.01
    every: int = 0

    def __post_init__(self) -> None:
        _check_number("exponential", "factor", self.factor, 1e-30, 1)
        _check_integer("exponential", "every", self.every, 0, "steps, or 0 for the length of the run")

    @property
    def needs_total_steps(self) -> bool:
        """See base class."""
        return not self.every


@dataclasses.dataclass(frozen=True)
class Step(Decay):
    """Multiplication by a factor at fixed intervals.

    Attributes:
      every: number of steps between multiplications, counted from the first step of the run; at least 1.
      factor: in [0, 1].
    """

    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_integer("step", "every", self.every, 1, "steps")
        _check_number("step", "factor", self.factor, 0, 1)


@dataclasses.dataclass(frozen=True)
class CosineRestarts(Decay):
    """Cosine decay with warm restarts (SGDR, Loshchilov and Hutter, arXiv:1608.03983), from the end of the warmup.

    Attributes:
      first: number of steps of the first cycle.
      t_mul: ratio of the lengths of successive cycles; 1, or at least 1.1.
      m_mul: ratio of the rates at the start of successive cycles, in [0, 1].
      to: rate at the end of a cycle as a fraction of the peak, in [0, 1].
    """

    first: int
    t_mul: float = 2.0
    m_mul: float = 1.0
    to: float = 0.0

    def __post_init__(self) -> None:
        _check_integer("cosine_restarts", "first", self.first, 1, "steps")
        if self.t_mul != 1:
            _check_number("cosine_restarts", "t_mul, unless it is 1,", self.t_mul, _MIN_T_MUL, 1000)
        _check_number("cosine_restarts", "m_mul", self.m_mul, 0, 1)
        _check_number("cosine_restarts", "to", self.to, 0, 1)


@dataclasses.dataclass(frozen=True)
class OneCycle(Decay):
    """The one-cycle policy (Smith and Topin, arXiv:1708.07120): the rate rises to the peak, then falls to almost 0.

    The momentum moves in the opposite direction. PyTorch's `OneCycleLR` has the same names and defaults.

    Attributes:
      pct_start: fraction of the run in which the rate rises, in (0, 1).
      div_factor: ratio of the peak to the initial rate, at least 1.
      final_div_factor: ratio of the initial rate to the final rate, at least 1.
      anneal: shape of the rise and fall: "cosine", or "linear" as in the paper.
      cycle_momentum: whether to change the momentum of optimizers that have one, and `beta_1` of the Adam family.
      max_momentum: momentum at the beginning and at the end, in [0, 1).
      base_momentum: momentum at the peak of the rate, in [0, 1).
    """

    warmup_conflict: ClassVar[str] = "one_cycle begins with a rise of its own, pct_start of the run"
    pct_start: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    anneal: str = "cosine"
    cycle_momentum: bool = True
    max_momentum: float = 0.95
    base_momentum: float = 0.85

    def __post_init__(self) -> None:
        _check_number("one_cycle", "pct_start", self.pct_start, 1e-6, 1 - 1e-6)
        _check_number("one_cycle", "div_factor", self.div_factor, 1, math.inf)
        _check_number("one_cycle", "final_div_factor", self.final_div_factor, 1, math.inf)
        _check_choice("one_cycle", "anneal", self.anneal, ANNEALS)
        if type(self.cycle_momentum) is not bool:
            raise InputError(f"one_cycle: cycle_momentum must be True or False. Received: {self.cycle_momentum!r}.")
        for name in ("max_momentum", "base_momentum"):
            _check_number("one_cycle", name, getattr(self, name), 0, 1 - 1e-6)

    @property
    def needs_total_steps(self) -> bool:
        """See base class."""
        return True


@dataclasses.dataclass(frozen=True)
class Plateau(Decay):
    """Multiplication of a constant rate by a factor whenever a metric stops improving.

    `keras.callbacks.ReduceLROnPlateau` has the same names and defaults.

    Attributes:
      monitor: name of the metric, with the prefix `val_` for an evaluation.
      mode: "min" or "max", the better direction; "auto" to infer it from the metric.
      factor: in [0, 1).
      patience: number of evaluations without improvement before the rate is reduced.
      min_delta: smallest change that counts as an improvement.
      cooldown: number of evaluations to ignore after a reduction.
      min_lr: smallest learning rate.
    """

    warmup_conflict: ClassVar[str] = "plateau changes a rate that is constant otherwise"
    monitor: str = "val_loss"
    mode: str = "auto"
    factor: float = 0.1
    patience: int = 10
    min_delta: float = 1e-4
    cooldown: int = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str) or not re.fullmatch(r"\w+", self.monitor):
            raise InputError(
                f"plateau: monitor must be the name of a metric, such as val_loss. Received: {self.monitor!r}."
            )
        _check_choice("plateau", "mode", self.mode, MODES)
        _check_number("plateau", "factor", self.factor, 0, 1 - 1e-6)
        _check_integer("plateau", "patience", self.patience, 0, "evaluations")
        _check_number("plateau", "min_delta", self.min_delta, 0, math.inf)
        _check_integer("plateau", "cooldown", self.cooldown, 0, "evaluations")
        _check_number("plateau", "min_lr", self.min_lr, 0, math.inf)


@dataclasses.dataclass(frozen=True)
class CustomDecay(Decay):
    """A user-defined schedule, `package.module:function(...)`.

    Attributes:
      spec: the function and its arguments.
    """

    spec: Spec


DECAYS: Mapping[str, type[Decay]] = {
    "none": NoDecay,
    "cosine": Cosine,
    "cosine_restarts": CosineRestarts,
    "exponential": Exponential,
    "linear": Linear,
    "one_cycle": OneCycle,
    "plateau": Plateau,
    "polynomial": Polynomial,
    "step": Step,
}


def parse_decay(text: str) -> Decay:
    """Parses a name in `DECAYS` with its arguments, such as `cosine(to=0.0)`, or `package.module:function(...)`.

    Raises:
      InputError: the name or a parameter is unknown or out of range.
    """
    spec = _spec(text)
    if ":" in spec.name:
        return CustomDecay(spec)
    if spec.name not in DECAYS:
        raise InputError(
            f"{spec.name} is not a known decay.{nearest(spec.name, DECAYS)} For your own, use package.module:function"
        )
    return call(DECAYS[spec.name], spec)


def normalize_decay(text: str) -> str:
    """Normalizes the value of `--decay`."""
    return str(_spec(text))


def _spec(text: str) -> Spec:
    is_user_function = ":" in text.partition("(")[0]
    return parse(text, () if is_user_function else _WORDS)


def _check_number(decay: str, name: str, value: object, minimum: float, maximum: float) -> None:
    if is_number(value) and minimum <= value <= maximum and math.isfinite(value):
        return
    if math.isinf(maximum):
        rule = f"a finite number of at least {minimum:g}"
    elif 0 < minimum < 1e-5:
        rule = f"a number above 0 and {'below 1' if maximum < 1 else f'at most {maximum:g}'}"
    else:
        rule = "a number in [0, 1)" if maximum < 1 else f"a number in [{minimum:g}, {maximum:g}]"
    raise InputError(f"{decay}: {name} must be {rule}. Received: {value!r}.")


def _check_integer(decay: str, name: str, value: object, minimum: int, unit: str) -> None:
    if not is_integer(value) or value < minimum:
        raise InputError(f"{decay}: {name} must be an integer of {unit}, at least {minimum}. Received: {value!r}.")


def _check_choice(decay: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{decay}: {name} must be {', '.join(choices[:-1])} or {choices[-1]}. Received: {value!r}.")
