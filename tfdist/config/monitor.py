"""Parses intervals in steps or seconds, and monitored metrics, such as `val_loss(patience=3)`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfdist.config.spec import Spec, parse
from tfdist.errors import InputError, nearest

MODES = ("auto", "min", "max")


class Interval(NamedTuple):
    """An interval in steps or seconds; 0 for both means never."""

    steps: int = 0
    seconds: float = 0.0  # seconds of wall time


def parse_interval(text: str) -> Interval:
    """Parses `500` (steps), `600s` (seconds), or an empty string or 0 (never); raises `InputError`."""
    match = re.fullmatch(r"(\d{1,18})|(\d{1,18}(?:\.\d{1,9})?)s", text.strip() or "0")
    if not match or (match[2] and not float(match[2])):
        raise InputError(f"{text} must be a number of steps such as 500, or of seconds such as 600s")
    return Interval(seconds=float(match[2])) if match[2] else Interval(steps=int(match[1]))


@dataclasses.dataclass(frozen=True)
class Monitor:
    """A metric to monitor, how to compare its values, and further arguments."""

    metric: str  # name as in Keras's logs, with the prefix `val_` for an evaluation
    mode: str = "auto"  # "min" or "max", the better direction; "auto" to infer it from the metric, as Keras does
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further arguments by name

    def __str__(self) -> str:
        mode = {} if self.mode == "auto" else {"mode": self.mode}
        return str(Spec(self.metric, {**self.args, **mode}))


def parse_monitor(text: str, **minimums: float) -> Monitor:
    """Parses `metric` or `metric(name=value, ...)`; raises `InputError`.

    `minimums` are the allowed arguments besides `mode`, each with its minimum; an int minimum requires an int.
    """
    spec = parse(text, words=("mode",))
    if not re.fullmatch(r"\w+", spec.name):
        raise InputError(f"{text} must begin with the name of a metric. Write val_loss, or val_accuracy(mode=max)")
    args = dict(spec.args)
    mode = args.pop("mode", "auto")
    if mode not in MODES:
        raise InputError(f"{text}: mode must be min, max or auto. Received: {mode!r}")
    for name, value in args.items():
        if name not in minimums:
            raise InputError(f'{text} has no parameter "{name}".{nearest(name, [*minimums, "mode"])}')
        types = (int,) if isinstance(minimums[name], int) else (int, float)
        if type(value) not in types or value < minimums[name]:
            type_name = "an integer" if types == (int,) else "a number"
            raise InputError(f"{text}: {name} must be {type_name} of at least {minimums[name]:g}. Received: {value!r}")
    return Monitor(spec.name, mode, args)


def parse_early_stopping(text: str) -> Monitor:
    """Parses the metric that ends a run, `val_loss(patience=3, min_delta=0)`; raises `InputError`."""
    return parse_monitor(text, patience=0, min_delta=0.0)
