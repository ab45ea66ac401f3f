"""Parses what is done about a replica that is late in a step, `--straggler`: `wait`, `balance` or `drop(after=1.5)`."""

import dataclasses
import math

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_number
from tfdist.grammar.balance import EQUAL, MEASURED
from tfdist.grammar.spec import did_you_mean, parse

WAIT, BALANCE, DROP = "wait", "balance", "drop"
_AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Straggler:
    """What is done about a replica that is late in a step.

    Attributes:
      kind: "wait", "balance" or "drop".
      after: with "drop", seconds of computation after which a replica begins no further micro-step of a step, more than 0;
        None to choose them by measurement.
    """

    kind: str = WAIT
    after: float | None = None

    def __str__(self) -> str:
        """Returns a text that `parse_straggler` converts to an equal value."""
        return f"{DROP}(after={_AUTO if self.after is None else f'{self.after:.12g}'})" if self.drops else self.kind

    @property
    def drops(self) -> bool:
        """Whether late replicas drop micro-steps."""
        return self.kind == DROP

    @property
    def is_measured(self) -> bool:
        """Whether the limit of the time is chosen by measurement."""
        return self.drops and self.after is None


def parse_straggler(text: str) -> Straggler:
    """Parses `wait`, `balance`, `drop(after=1.5)` or `drop(after=auto)`, for which `drop` is short.

    Raises:
      InputError: `text` is none of these, or `after` is not a positive number.
    """
    spec = parse(text, ("after",))
    if spec.name in (WAIT, BALANCE):
        if spec.args or text.strip() != spec.name:
            raise InputError(f"{text}: {spec.name} has no arguments. Write {spec.name}")
        return Straggler(spec.name)
    if spec.name != DROP:
        question = did_you_mean(spec.name, (WAIT, BALANCE, DROP))
        raise InputError(f"{text} is not known.{question} Known: {WAIT}, {BALANCE}, {DROP}(after=1.5).")
    unknown = [name for name in spec.args if name != "after"]
    after = spec.args.get("after", _AUTO)
    if unknown or (after != _AUTO and not (is_number(after) and 0 < after < math.inf)):
        raise InputError(
            f"{text} must have after=auto, or after=SECONDS above 0, after which a replica begins no further micro-step of a "
            "step. Write drop(after=0.5) or drop(after=auto)"
        )
    return Straggler(DROP, None if after == _AUTO else float(after))


def balanced(straggler: Straggler, balance: str) -> str:
    """Returns how rows are allocated to replicas, given `--straggler` and `--balance`."""
    return MEASURED if straggler.kind == BALANCE and balance == EQUAL else balance
