"""Parses `--balance`, the division of a batch's rows among replicas: `equal`, `measured` or `weights(2,1,1)`."""

import dataclasses
import math
import re

from tfdist.errors import InputError
from tfdist.errors.formatting import nearest

EQUAL, MEASURED, WEIGHTS = "equal", "measured", "weights"
_KNOWN = (EQUAL, MEASURED, f"{WEIGHTS}(2,1,1)")
_LEAST_RATIO = 1e-6  # of two weights, so that their sum is exact enough


@dataclasses.dataclass(frozen=True)
class Balance:
    """The division of a batch's rows among replicas.

    Attributes:
      kind: "equal", "measured" or "weights".
      weights: with "weights", a positive number for each replica; else empty.
    """

    kind: str = EQUAL
    weights: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Returns a text that `parse_balance` converts to an equal value."""
        return f"{self.kind}({','.join(f'{weight:.12g}' for weight in self.weights)})" if self.weights else self.kind


def parse_balance(text: str) -> Balance:
    """Parses `equal`, `measured` or `weights(2,1,1)`.

    Raises:
      InputError: `text` is none of these, or a weight is not a positive number.
    """
    match = re.fullmatch(r"\s*(\w*)\s*(?:\((.*)\))?\s*", text)
    name, arguments = (match[1], match[2]) if match else (text, None)
    if name in (EQUAL, MEASURED):
        if arguments is not None:
            raise InputError(f"{text}: {name} has no arguments. Write {name}")
        return Balance(name)
    if name != WEIGHTS:
        raise InputError(f"{text} is not known.{nearest(name, _KNOWN)}")
    return Balance(WEIGHTS, _weights(text, arguments))


def _weights(text: str, arguments: str | None) -> tuple[float, ...]:
    try:
        weights = tuple(float(part) for part in (arguments or "").split(","))
    except ValueError:
        weights = ()
    are_positive = bool(weights) and all(math.isfinite(w) and w > 0 for w in weights)
    if not are_positive or min(weights) < _LEAST_RATIO * max(weights):
        least = f", at least {_LEAST_RATIO:g} of the largest" if are_positive else ""
        raise InputError(
            f"{text} must have a positive number for each replica{least}, in the order of their ranks. Write weights(2,1) for "
            "a first replica that is twice as fast as the second"
        )
    return weights
