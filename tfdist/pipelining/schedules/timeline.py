"""Timelines: when each process computes which action, predicted or measured."""

import dataclasses
from typing import NamedTuple, Self

from tfdist.pipelining.schedules.schedule import Action


class Span(NamedTuple):
    """The time of one action.

    Attributes:
      action: what is computed.
      start: seconds from the beginning of the timeline.
      end: seconds from the beginning of the timeline.
    """

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The actions of all processes over time.

    Attributes:
      spans: the actions of each process with their times, in their order. Times are those of one clock.
      live_activations: the most activations that each process keeps; see `Schedule.live_activations`.
    """

    spans: tuple[tuple[Span, ...], ...]
    live_activations: tuple[float, ...] = ()

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first action to the end of the last one."""
        starts = [span.start for row in self.spans for span in row]
        return max((span.end for row in self.spans for span in row), default=0.0) - min(starts, default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each process computes."""
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the time of all processes in which they do not compute, in [0, 1)."""
        total = self.makespan * len(self.spans)
        return 1 - sum(self.busy) / total if total else 0.0

    def between(self, start: float, end: float) -> Self:
        """Returns the part of a timeline between two times; actions at its borders are cut."""
        rows = tuple(
            tuple(
                span._replace(start=max(span.start, start), end=min(span.end, end))
                for span in row
                if span.start < end and start < span.end
            )
            for row in self.spans
        )
        return dataclasses.replace(self, spans=rows)
