"""Parses `--decay`, the learning-rate decay. Does not import TensorFlow."""

import dataclasses
from collections.abc import Mapping

from tfdist.errors import InputError
from tfdist.grammar.spec import call, nearest, parse


class Decay:
    """Base class of learning-rate decays; the fields of subclasses are the parameters in the flag.

    Attributes:
      needs_total: whether the number of steps of the run must be known.
    """

    needs_total = False


@dataclasses.dataclass(frozen=True)
class NoDecay(Decay):
    """A constant learning rate."""


@dataclasses.dataclass(frozen=True)
class Falling(Decay):
    """A decay from the end of the warmup to the end of the run.

    Attributes:
      to: final learning rate as a fraction of the peak, in [0, 1].
    """

    to: float = 0.0
    needs_total = True

    def __post_init__(self) -> None:
        _check_part(type(self).__name__.lower(), "to", self.to)


class Cosine(Falling):
    """Cosine decay (Loshchilov and Hutter, arXiv:1608.03983)."""


class Linear(Falling):
    """Linear decay."""


@dataclasses.dataclass(frozen=True)
class Step(Decay):
    """Repeated multiplication by a factor.

    Attributes:
      every: number of steps between multiplications, counted from the first step of the run; at least 1.
      factor: in [0, 1].
    """

    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise InputError(f"step: every must be an integer of steps, at least 1. Received: {self.every!r}.")
        _check_part("step", "factor", self.factor)


DECAYS: Mapping[str, type[Decay]] = {"none": NoDecay, "cosine": Cosine, "linear": Linear, "step": Step}


def parse_decay(text: str) -> Decay:
    """Parses `none`, `cosine(to=0.0)`, `linear(to=0.0)` or `step(every=1000, factor=0.1)`.

    Raises:
      InputError: the name or a parameter is unknown or out of range.
    """
    spec = parse(text)
    if spec.name not in DECAYS:
        raise InputError(f"{spec.name} is not a known decay.{nearest(spec.name, DECAYS)}")
    return call(DECAYS[spec.name], spec)


def _check_part(decay: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{decay}: {name} must be a number in [0, 1]. Received: {value!r}.")
