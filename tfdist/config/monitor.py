"""Parses intervals in steps or seconds, and which metric of a run is watched: `val_loss(patience=3)`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfdist.config.spec import parse
from tfdist.errors import InputError
from tfdist.errors.formatting import nearest

MODES = ("auto", "min", "max")


class Interval(NamedTuple):
    """An interval; at most one of the fields is positive, and neither means never.

    Attributes:
      steps: number of steps.
      seconds: wall time.
    """

    steps: int = 0
    seconds: float = 0.0


def parse_interval(text: str) -> Interval:
    """Parses `500` (steps), `600s` (seconds), or an empty text or 0 (never).

    Raises:
      InputError: the text is none of these.
    """
    match = re.fullmatch(r"(\d{1,18})|(\d{1,18}(?:\.\d{1,9})?)s", text.strip() or "0")
    if not match or (match[2] and not float(match[2])):
        raise InputError(f"{text} must be a number of steps such as 500, or of seconds such as 600s")
    return Interval(seconds=float(match[2])) if match[2] else Interval(steps=int(match[1]))


@dataclasses.dataclass(frozen=True)
class Monitor:
    """A metric, how its values are compared, and further arguments.

    Attributes:
      metric: name as in Keras's logs: `val_` and the name of a metric of an evaluation, or a metric of the epoch.
      mode: "min" or "max", what is better; "auto" to infer it from the metric, as Keras does.
      args: further arguments by name.
    """

    metric: str
    mode: str = "auto"
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Returns a text that `parse_monitor` converts to an equal monitor."""
        mode = {} if self.mode == "auto" else {"mode": self.mode}
        arguments = ", ".join(f"{name}={value!r}" for name, value in {**self.args, **mode}.items())
        return f"{self.metric}({arguments})" if arguments else self.metric


def parse_monitor(text: str, **least: float) -> Monitor:
    """Parses a monitor.

    Args:
      text: `metric` or `metric(name=value, ...)`.
      **least: the arguments that it may have besides `mode`, with the minimum of each, an int if it must be one.

    Raises:
      InputError: `text` does not follow the grammar, or an argument is unknown or out of range.
    """
    spec = parse(text, words=("mode",))
    if not re.fullmatch(r"\w+", spec.name):
        raise InputError(f"{text} must begin with the name of a metric. Write val_loss, or val_accuracy(mode=max)")
    args = dict(spec.args)
    mode = args.pop("mode", "auto")
    if mode not in MODES:
        raise InputError(f"{text}: mode must be min, max or auto. Received: {mode!r}")
    for name, value in args.items():
        if name not in least:
            raise InputError(f'{text} has no parameter "{name}".{nearest(name, [*least, "mode"])}')
        kinds = (int,) if isinstance(least[name], int) else (int, float)
        if type(value) not in kinds or value < least[name]:
            kind = "an integer" if kinds == (int,) else "a number"
            raise InputError(f"{text}: {name} must be {kind} of at least {least[name]:g}. Received: {value!r}")
    return Monitor(spec.name, mode, args)


def parse_best(text: str) -> Monitor:
    """Parses the metric whose best value is kept; raises `InputError`."""
    return parse_monitor(text)


def parse_early_stopping(text: str) -> Monitor:
    """Parses the metric that ends a run, `val_loss(patience=3, min_delta=0)`; raises `InputError`."""
    return parse_monitor(text, patience=0, min_delta=0.0)
