"""Predicts timelines of the actions of processes, and plots predicted or measured timelines."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from tfdist.pipelining.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Schedule, result_of
from tfdist.reporting.run_summary import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Span(NamedTuple):
    """The start and end of an action, in seconds from the beginning of the timeline."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The actions of all processes over time."""

    spans: tuple[tuple[Span, ...], ...]  # of each process, in order, on one clock

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first action to the end of the last one."""
        starts = [span.start for spans in self.spans for span in spans]
        return max((span.end for spans in self.spans for span in spans), default=0.0) - min(starts, default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds in which each process computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The fraction of idle time over all processes, in [0, 1)."""
        total = self.makespan * len(self.spans)
        return 1 - sum(self.busy_seconds) / total if total else 0.0

    def clip(self, start: float, end: float) -> Self:
        """Returns the part of the timeline between two times; actions that cross them are shortened."""
        clipped_spans = tuple(
            tuple(
                span._replace(start=max(span.start, start), end=min(span.end, end))
                for span in spans
                if span.start < end and start < span.end
            )
            for spans in self.spans
        )
        return dataclasses.replace(self, spans=clipped_spans)


Durations = float | Sequence[float]


def simulate(
    schedule: Schedule,
    *,
    forward: Durations,
    backward: Durations,
    weight: Durations | None = None,
    input_gradient: Durations | None = None,
) -> Timeline:
    """Predicts the times of all actions; messages take no time.

    Durations are in seconds, one number for all stages or one per stage. By default, `weight` is half of `backward`, and
    `input_gradient` is the rest, as if splitting the backward pass took no time.
    """

    def by_stage(durations: Durations) -> Sequence[float]:
        return durations if isinstance(durations, Sequence) else [durations] * schedule.stages

    weights = [seconds / 2 for seconds in by_stage(backward)] if weight is None else by_stage(weight)
    input_seconds = [max(total - w, 0.0) for total, w in zip(by_stage(backward), weights, strict=True)]
    durations = {
        FORWARD: by_stage(forward),
        BACKWARD: by_stage(backward),
        WEIGHT_GRADIENT: weights,
        INPUT_GRADIENT: input_seconds if input_gradient is None else by_stage(input_gradient),
    }
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ends: dict[Action, float] = {}

    def start_next(process: int) -> bool:
        """Starts the next action of a process if the results that it needs are available; returns whether it did."""
        if len(spans[process]) == len(schedule.actions[process]):
            return False
        action = schedule.actions[process][len(spans[process])]
        requirements = schedule.requirements(action)
        if not ends.keys() >= set(requirements):
            return False
        free_time = spans[process][-1].end if spans[process] else 0.0
        start = max([free_time, *(ends[requirement] for requirement in requirements)])
        spans[process].append(Span(action, start, start + durations[action.kind][action.stage]))
        ends[result_of(action)] = spans[process][-1].end
        return True

    while any([start_next(process) for process in range(schedule.processes)]):
        pass
    return Timeline(tuple(map(tuple, spans)))


# One hue per kind of action: full color for the first chunk of a process, the lightest for the last one.
_COLORS = {FORWARD: "#2f6fae", BACKWARD: "#c55a11", INPUT_GRADIENT: "#d9a514", WEIGHT_GRADIENT: "#4f8f3a"}
_LABELS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRADIENT: "gradient of the input",
    WEIGHT_GRADIENT: "gradient of the weights",
}
_IDLE = "#efefef"
_MAX_WHITE = 0.6  # fraction of white in the color of the last chunk
_WIDTH, _ROW_HEIGHT = 12.0, 0.36  # inches
_DIGIT_WIDTH = 0.085  # inches


def draw(timelines: Mapping[str, Timeline]) -> "Figure":
    """Returns a figure with one panel per timeline, stacked on a common time axis.

    A panel has a row for each process with a box for each action, labeled with the micro-batch; idle time is gray, and later
    chunks have lighter colors. The figure has no window and does not use matplotlib's global state. The keys are titles
    such as "1f1b, measured".
    """
    from matplotlib.patches import Patch  # imported late, because it takes 0.4 s

    rows = [len(timeline.spans) for timeline in timelines.values()]
    height = sum(_ROW_HEIGHT * count + 0.45 for count in rows) + 0.8
    figure = new_figure(_WIDTH, height)
    panels: list[Axes] = [*figure.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=rows)[:, 0]]
    end = max(timeline.makespan for timeline in timelines.values()) or 1.0
    factor, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _panel(axes, timeline, end, factor)
        bubble = f"{timeline.makespan * factor:.4g} {unit}, bubble {timeline.bubble:.1%}"
        axes.set_title(f"{title}: {bubble}".replace("$", r"\$"), loc="left", fontsize="medium", fontweight="bold")
    panels[-1].set_xlabel(unit)
    kinds = {span.action.kind for timeline in timelines.values() for row in timeline.spans for span in row}
    handles = [Patch(color=_COLORS[kind], label=label) for kind, label in _LABELS.items() if kind in kinds]
    if max(map(_chunks, timelines.values())) > 1:
        handles.append(Patch(color="#bbbbbb", label="lighter: later chunks"))
    handles.append(Patch(color=_IDLE, label="idle"))
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=len(handles))
    return figure


def _panel(axes: "Axes", timeline: Timeline, end: float, factor: float) -> None:
    processes = len(timeline.spans)
    first = min((span.start for row in timeline.spans for span in row), default=0.0)
    chunks = _chunks(timeline)
    inches_per_second = (_WIDTH - 1.2) / end
    for process, row in enumerate(timeline.spans):
        axes.barh(process, timeline.makespan * factor, height=0.84, color=_IDLE, linewidth=0)
        for span in row:
            start, duration = (span.start - first) * factor, (span.end - span.start) * factor
            fill = _color(span, processes, chunks)
            axes.barh(process, duration, left=start, height=0.84, color=fill, edgecolor="white", linewidth=0.6)
            text = str(span.action.micro_batch)
            if (span.end - span.start) * inches_per_second > _DIGIT_WIDTH * (len(text) + 0.5):
                has_dark_text = span.action.stage // processes > (chunks - 1) / 2
                color = "#222222" if has_dark_text else "white"
                axes.text(start + duration / 2, process, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_yticks(range(processes), labels=[f"process {process}" for process in range(processes)])
    axes.set_ylim(processes - 0.5, -0.5)
    axes.set_xlim(0, end * factor)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _chunks(timeline: Timeline) -> int:
    """Returns the number of chunks, that is, stages in each process."""
    last_stage = max((span.action.stage for row in timeline.spans for span in row), default=0)
    return 1 + last_stage // max(len(timeline.spans), 1)


def _color(span: Span, processes: int, chunks: int) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    white = _MAX_WHITE * (span.action.stage // processes) / max(chunks - 1, 1)
    return tuple(channel + (1 - channel) * white for channel in to_rgb(_COLORS[span.action.kind]))
