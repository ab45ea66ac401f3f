"""Parses `--decay`, the learning-rate schedule. Does not import TensorFlow."""

import dataclasses
import re
from collections.abc import Mapping
from typing import ClassVar

from tfdist.config.monitor import MODES
from tfdist.config.parameters import REQUIRED, Parameters, boolean, choice, integer, number, parameter, parse_kind
from tfdist.config.spec import Spec, parse
from tfdist.errors import is_number

ANNEALS = ("cosine", "linear")


@dataclasses.dataclass(frozen=True)
class Decay(Parameters):
    """Base class of learning-rate schedules; the fields of subclasses are the parameters in the flag."""

    warmup_conflict: ClassVar[str] = ""  # why a warmup is not supported, as a clause; empty if it is supported
    # Whether the schedule depends on the number of steps of the run, whatever its parameters.
    ends_with_run: ClassVar[bool] = False

    @property
    def needs_total_steps(self) -> bool:
        """Whether the schedule depends on the number of steps of the run."""
        return self.ends_with_run


@dataclasses.dataclass(frozen=True)
class NoDecay(Decay):
    """A constant learning rate."""

    name: ClassVar[str] = "none"


@dataclasses.dataclass(frozen=True)
class FinalRateDecay(Decay):
    """A decay from the end of the warmup to the end of the run."""

    ends_with_run: ClassVar[bool] = True
    to: float = number(0.0, "[0, 1]")  # final learning rate as a fraction of the peak, in [0, 1]


@dataclasses.dataclass(frozen=True)
class Cosine(FinalRateDecay):
    """Cosine decay (Loshchilov and Hutter, arXiv:1608.03983)."""

    name: ClassVar[str] = "cosine"


@dataclasses.dataclass(frozen=True)
class Linear(FinalRateDecay):
    """Linear decay."""

    name: ClassVar[str] = "linear"


@dataclasses.dataclass(frozen=True)
class Polynomial(FinalRateDecay):
    """Polynomial decay: the part of the rate above the final one is (1 - progress) to a power."""

    name: ClassVar[str] = "polynomial"
    power: float = number(1.0, "(0, inf)")  # above 0; 1 is linear


@dataclasses.dataclass(frozen=True)
class Exponential(Decay):
    """Exponential decay at every step."""

    name: ClassVar[str] = "exponential"
    factor: float = number(0.01, "(0, 1]")  # fraction of the rate that remains after `every` steps, in (0, 1]
    # Number of steps, counted from the end of the warmup; 0 for all steps up to the end of the run.
    every: int = integer(0, 0, "steps")

    @property
    def needs_total_steps(self) -> bool:
        return not self.every


@dataclasses.dataclass(frozen=True)
class Step(Decay):
    """Multiplication by a factor at fixed intervals."""

    name: ClassVar[str] = "step"
    # Number of steps between multiplications, counted from the first step of the run; at least 1.
    every: int = integer(REQUIRED, 1, "steps")
    factor: float = number(0.1, "[0, 1]")


@dataclasses.dataclass(frozen=True)
class CosineRestarts(Decay):
    """Cosine decay with warm restarts (SGDR, Loshchilov and Hutter, arXiv:1608.03983), from the end of the warmup."""

    name: ClassVar[str] = "cosine_restarts"
    first: int = integer(REQUIRED, 1, "steps")  # number of steps of the first cycle
    # Ratio of the lengths of successive cycles: 1, or at least 1.1, because ratios in between result in too many cycles
    # to tabulate.
    t_mul: float = parameter(
        2.0, lambda x: is_number(x) and (x == 1 or 1.1 <= x <= 1000), "1, or a number in [1.1, 1000]"
    )
    m_mul: float = number(1.0, "[0, 1]")  # ratio of the rates at the start of successive cycles, in [0, 1]
    to: float = number(0.0, "[0, 1]")  # rate at the end of a cycle as a fraction of the peak, in [0, 1]


@dataclasses.dataclass(frozen=True)
class OneCycle(Decay):
    """The one-cycle policy (Smith and Topin, arXiv:1708.07120): the rate rises to the peak, then falls to almost 0.

    The momentum moves in the opposite direction. PyTorch's `OneCycleLR` has the same names and defaults, except that it calls
    `anneal` `anneal_strategy`.
    """

    name: ClassVar[str] = "one_cycle"
    warmup_conflict: ClassVar[str] = "one_cycle begins with its own rise, for the fraction pct_start of the run"
    ends_with_run: ClassVar[bool] = True
    pct_start: float = number(0.3, "(0, 1)")  # fraction of the run in which the rate rises, in (0, 1)
    div_factor: float = number(25.0, "[1, inf)")  # ratio of the peak to the initial rate, at least 1
    final_div_factor: float = number(1e4, "[1, inf)")  # ratio of the initial rate to the final rate, at least 1
    anneal: str = choice("cosine", ANNEALS)  # shape of the rise and fall: "cosine", or "linear" as in the paper
    # Whether to change the momentum of optimizers that have one, and `beta_1` of the Adam family.
    cycle_momentum: bool = boolean(True)
    max_momentum: float = number(0.95, "[0, 1)")  # momentum at the beginning and at the end, in [0, 1)
    base_momentum: float = number(0.85, "[0, 1)")  # momentum at the peak of the rate, in [0, 1)


@dataclasses.dataclass(frozen=True)
class Plateau(Decay):
    """Multiplication of a constant rate by a factor whenever a metric stops improving.

    `keras.callbacks.ReduceLROnPlateau` has the same names and defaults.
    """

    warmup_conflict: ClassVar[str] = "plateau reduces a rate that is otherwise constant"
    name: ClassVar[str] = "plateau"
    # Name of the metric, with the prefix `val_` for an evaluation.
    monitor: str = parameter(
        "val_loss",
        lambda x: isinstance(x, str) and bool(re.fullmatch(r"\w+", x)),
        "the name of a metric, such as val_loss",
    )
    mode: str = choice("auto", MODES)  # "min" or "max", the better direction; "auto" to infer it from the metric
    factor: float = number(0.1, "[0, 1)")
    # Number of evaluations without improvement before the rate is reduced.
    patience: int = integer(10, 0, "evaluations")
    min_delta: float = number(1e-4, "[0, inf)")  # smallest change that counts as an improvement
    cooldown: int = integer(0, 0, "evaluations")  # number of evaluations to ignore after a reduction
    min_lr: float = number(0.0, "[0, inf)")  # smallest learning rate


@dataclasses.dataclass(frozen=True)
class CustomDecay(Decay):
    """A user-defined schedule, `package.module:function(...)`."""

    spec: Spec  # the function and its arguments

    def __str__(self) -> str:
        return str(self.spec)


DECAYS: Mapping[str, type[Decay]] = {
    kind.name: kind
    for kind in (NoDecay, Cosine, CosineRestarts, Exponential, Linear, OneCycle, Plateau, Polynomial, Step)
}


def parse_decay(text: str) -> Decay:
    """Parses a name in `DECAYS` with its arguments, such as `cosine(to=0.0)`, or `package.module:function(...)`."""
    if ":" in text.partition("(")[0]:
        return CustomDecay(parse(text))
    own = " For your own schedule, use package.module:function"
    return parse_kind(text, DECAYS, "decay", words=("monitor", "mode", "anneal"), remedy=own)
