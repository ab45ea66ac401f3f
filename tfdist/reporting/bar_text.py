"""The text of a progress bar: the fields that fit into a line, the speed, and the remaining time."""

import collections
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfdist.coordination import Json
from tfdist.reporting.plain_reporter import communication, loss_and_metrics, printable, rounded
from tfdist.reporting.reporter import RunPlan
from tfdist.reporting.schema import number

_LEAST_BAR = 6
_SPEED_SECONDS = 30.0  # the speed is that of the last half minute
# What a line has, from most to least: its fields, whether they are long, and whether there is a bar.
_LEVELS = (
    ("epoch step time loss metric speed communication", True, True),
    ("epoch step time loss metric speed", True, True),
    ("epoch step time loss metric speed", False, True),
    ("epoch step time loss metric speed", False, False),
    ("epoch step time loss speed", False, True),
    ("epoch step time loss speed", False, False),
    ("epoch step time loss", False, False),
    ("step time loss", False, False),
    ("step loss", False, False),
    ("step", False, False),
)
_AFTER_BAR = ("time", "loss", "metric", "speed", "communication", "status")


class Line(NamedTuple):
    """A line of a progress bar.

    Attributes:
      left: text before the bar.
      filled: columns of the bar for what is done.
      empty: columns of the bar for what remains; 0 with `filled` 0 if there is no room for a bar.
      right: text after the bar.
    """

    left: str
    filled: int
    empty: int
    right: str

    def __str__(self) -> str:
        """Returns the line without colors, where only the filled part of the bar can be seen."""
        bar = "━" * self.filled + " " * self.empty
        return " ".join(part for part in (self.left, bar, self.right) if part)


class BarText:
    """Follows a run, and describes its state in one line of a given width.

    Args:
      plan: plan of the run.
      clock: monotonic clock in seconds.
    """

    def __init__(self, plan: RunPlan, clock: Callable[[], float]):
        self._plan, self._clock = plan, clock
        self._began = clock()
        self._step = plan.first_step
        self._record: Mapping[str, Json] = {}
        # The first point is that after the first call, which has compiled the training step.
        self._points: collections.deque[tuple[float, int]] = collections.deque()
        self._status = ""
        self._width, self._level = 0, 0

    def update(self, step: int, record: Mapping[str, Json]) -> None:
        """Sets the number of updates done, and the latest loss and metrics."""
        now = self._clock()
        self._step, self._record = step, record
        if not self._points or step > self._points[-1][1]:
            self._points.append((now, step))
        while len(self._points) > 2 and self._points[1][0] < now - _SPEED_SECONDS:
            self._points.popleft()

    def set_status(self, text: str) -> None:
        """Sets what to show instead of loss and metrics; "" to show these again."""
        self._status = printable(text)

    def line(self, width: int) -> Line:
        """Returns the line for a terminal of `width` columns.

        What was omitted for lack of room stays omitted until the width changes, so that the line does not flicker.
        """
        if width != self._width:
            self._width, self._level = width, 0
        if self._status:
            return self._fitted(["epoch", "step", "status"], True, True, width) or Line("", 0, 0, self._status[:width])
        while self._level < len(_LEVELS):
            names, is_long, has_bar = _LEVELS[self._level]
            found = self._fitted(names.split(), is_long, has_bar, width)
            if found:
                return found
            self._level += 1
        return Line(self._field("step", is_long=False)[:width], 0, 0, "")

    def _fitted(self, names: list[str], is_long: bool, has_bar: bool, width: int) -> Line | None:
        separator = "  " if is_long else " "
        texts = {name: text for name in names if (text := self._field(name, is_long))}
        left = separator.join(text for name, text in texts.items() if name not in _AFTER_BAR)
        right = separator.join(text for name, text in texts.items() if name in _AFTER_BAR)
        if not has_bar:
            found = Line(left, 0, 0, right)
            return found if len(str(found)) <= width else None
        room = width - len(left) - len(right) - sum(1 for text in (left, right) if text)
        if room < _LEAST_BAR:
            return None
        filled = room * self._step // max(self._plan.total_steps, 1)
        return Line(left, min(filled, room), max(room - filled, 0), right)

    def _field(self, name: str, is_long: bool) -> str:
        plan, step = self._plan, self._step
        match name:
            case "epoch":
                return plan.epoch_text(step)
            case "step":
                return f"{'step ' if is_long else ''}{step}/{plan.total_steps}"
            case "time":
                return self._times(is_long)
            case "loss":
                return next(loss_and_metrics(self._record, most=0), "")
            case "metric":
                return next(iter([*loss_and_metrics(self._record, most=1)][-1:]), "") if self._has_metric else ""
            case "speed":
                unit = "examples/s" if is_long else "ex/s"
                speed = number(self._record.get("examples_per_second")) or self._speed * plan.batch_size
                return f"{rounded(speed)} {unit}" if speed else ""
            case "communication":
                return "  ".join(communication(self._record)) if plan.shows_communication else ""
        return self._status

    @property
    def _has_metric(self) -> bool:
        return len([*loss_and_metrics(self._record, most=1)]) > ("loss" in self._record)

    @property
    def _speed(self) -> float:
        """Steps per second of wall time, evaluations included; 0 if unknown."""
        if len(self._points) < 2:
            return 0.0
        (first_time, first), (last_time, last) = self._points[0], self._points[-1]
        return (last - first) / (last_time - first_time) if last_time > first_time else 0.0

    def _times(self, is_long: bool) -> str:
        elapsed = clock_time(self._clock() - self._began)
        remaining = clock_time((self._plan.total_steps - self._step) / self._speed) if self._speed else "-:--"
        return f"{elapsed}, {remaining} left" if is_long else f"{elapsed}<{remaining}"


def clock_time(seconds: float) -> str:
    """Returns a time as `0:07`, `12:34` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
