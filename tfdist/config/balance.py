"""Parses `--balance`, the division of a batch's rows among replicas: `equal`, `measured` or `weights(2,1,1)`."""

import dataclasses
import math
import re

from tfdist.errors import InputError, nearest

EQUAL, MEASURED, WEIGHTS = "equal", "measured", "weights"
_FORMS = (EQUAL, MEASURED, f"{WEIGHTS}(2,1,1)")
_MIN_RATIO = 1e-6  # minimum ratio of the smallest weight to the largest one, so that their sum is exact


@dataclasses.dataclass(frozen=True)
class Balance:
    """The division of a batch's rows among replicas."""

    kind: str = EQUAL  # "equal", "measured" or "weights"
    weights: tuple[float, ...] = ()  # a positive number for each replica if `kind` is "weights"; otherwise empty

    def __str__(self) -> str:
        return f"{self.kind}({','.join(f'{weight:.12g}' for weight in self.weights)})" if self.weights else self.kind


def parse_balance(text: str) -> Balance:
    """Parses `equal`, `measured` or `weights(2,1,1)`; raises `InputError`."""
    match = re.fullmatch(r"\s*(\w*)\s*(?:\((.*)\))?\s*", text)
    name, arguments = (match[1], match[2]) if match else (text, None)
    if name in (EQUAL, MEASURED):
        if arguments is not None:
            raise InputError(f"{text}: {name} takes no arguments. Write {name}")
        return Balance(name)
    if name != WEIGHTS:
        raise InputError(f"{text} is not known.{nearest(name, _FORMS)}")
    return Balance(WEIGHTS, _weights(text, arguments))


def _weights(text: str, arguments: str | None) -> tuple[float, ...]:
    try:
        weights = tuple(float(part) for part in (arguments or "").split(","))
    except ValueError:
        weights = ()
    are_positive = bool(weights) and all(math.isfinite(w) and w > 0 for w in weights)
    if not are_positive or min(weights) < _MIN_RATIO * max(weights):
        limit = f", at least {_MIN_RATIO:g} of the largest" if are_positive else ""
        raise InputError(
            f"{text} must have a positive number for each replica{limit}, in the order of their ranks. Write weights(2,1) for "
            "a first replica that is twice as fast as the second"
        )
    return weights
