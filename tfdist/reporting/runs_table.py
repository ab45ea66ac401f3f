"""Tables of runs and of their differences, as lines of text."""

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.reporting.plain_reporter import printable, rounded
from tfdist.reporting.run_summary import RunSummary

_NOT_COMPARED = ("output_dir",)
_MAIN = ("strategy", "model", "dataset")
UNKNOWN = "-"
_NAMES = ("run", "model", "data set")  # columns of texts that may be long
_SHORTENED = 20
_SHORTEST = 12


def columns(metric: str) -> dict[str, Callable[[RunSummary], str]]:
    """Returns the columns of the table: a function of a run by title.

    Args:
      metric: metric to show next to the loss.
    """
    shown = [name for name in dict.fromkeys(("loss", metric)) if name]
    values = {title: cell for name in shown for title, cell in ((name, _last(name)), (f"best {name}", _best(name)))}
    return {
        "run": lambda run: run.name,
        "started": lambda run: when(run.started),
        "strategy": lambda run: f"{run.strategy or UNKNOWN}{'' if run.replicas is None else f' x{run.replicas}'}",
        "model": lambda run: run.flags.get("model", UNKNOWN),
        "data set": lambda run: run.flags.get("dataset", UNKNOWN),
        "steps": lambda run: f"{run.steps}{'' if run.total_steps is None else f'/{run.total_steps}'}",
        "status": lambda run: run.status,
        **values,
        "time": lambda run: duration(run.seconds),
    }


def _last(metric: str) -> Callable[[RunSummary], str]:
    return lambda run: UNKNOWN if (value := run.last(metric)) is None else rounded(value)


def _best(metric: str) -> Callable[[RunSummary], str]:
    return lambda run: UNKNOWN if (found := run.best(metric)) is None else f"{rounded(found[1])} @{found[0]}"


def table(runs: Sequence[RunSummary], metric: str, width: int | None = None) -> list[str]:
    """Returns the lines of the table of runs, and a last text that names the columns for which there was no room.

    Args:
      runs: the runs.
      metric: metric to show next to the loss.
      width: number of columns of the terminal; None for any number.
    """
    shown = {title: [cell(run) for run in runs] for title, cell in columns(metric).items()}
    if width is None or _width(shown) <= width:
        return _lines(shown)
    for title in _NAMES:
        shown[title] = [shortened(cell, _SHORTENED) for cell in shown[title]]
    left_out = []
    for title in ("started", "loss", metric, "best loss", "time", "strategy", "model"):
        if title in shown and _width(shown) > width:
            left_out.append(title)
            del shown[title]
    note = f"Left out in {width} columns: {', '.join(left_out)}. A wider terminal, a pipe or --json shows all."
    return [*_lines(shown), *(textwrap.wrap(note, width) if left_out else [])]


def _width(shown: Mapping[str, Sequence[str]]) -> int:
    return max(map(len, _lines(shown)))


def _lines(shown: Mapping[str, Sequence[str]]) -> list[str]:
    return aligned([list(shown), *map(list, zip(*shown.values(), strict=True))])


def shortened(text: str, length: int) -> str:
    """Returns a text of at most `length` characters, at least 3, by replacing its middle, as in `csv:/data...e.csv`."""
    tail = (length - 3) // 2
    return text if len(text) <= length else f"{text[: length - 3 - tail]}...{text[len(text) - tail :]}"


def fitted(rows: Sequence[Sequence[str]], width: int | None) -> list[list[str]]:
    """Returns rows, whose cells after the first are shortened to fit `width` columns; None for any width."""
    if width is None:
        return [list(row) for row in rows]
    count, first = len(rows[0]) - 1, max(len(row[0]) for row in rows)
    length = max((width - first) // count - 2, _SHORTEST)
    return [[row[0], *(shortened(cell, length) for cell in row[1:])] for row in rows]


def differences(runs: Sequence[RunSummary]) -> list[list[str]]:
    """Returns rows of the flags and versions that differ: the name, and its value in each run."""
    rows = []
    for kind, of in (("", lambda run: run.flags), ("version of ", lambda run: run.versions)):
        names = sorted({name for run in runs for name in of(run)} - set(_NOT_COMPARED))
        for name in sorted(names, key=lambda name: name not in _MAIN):
            values = [of(run).get(name, UNKNOWN) for run in runs]
            if len(set(values)) > 1:
                rows.append([f"{kind}{name}", *(value or '""' for value in values)])
    replicas = [UNKNOWN if run.replicas is None else str(run.replicas) for run in runs]
    return rows if len(set(replicas)) == 1 else [*rows, ["number of replicas", *replicas]]


def results(runs: Sequence[RunSummary]) -> list[list[str]]:
    """Returns rows of results: the best value of each metric with its step, steps, status and time of each run."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    return [
        *([f"best {name}", *map(_best(name), runs)] for name in metrics),
        *([f"last {name}", *map(_last(name), runs)] for name in metrics),
        *([title, *(columns("")[title](run) for run in runs)] for title in ("steps", "status", "time", "started")),
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the rows as lines with aligned columns; empty if there are none."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def duration(seconds: float | None) -> str:
    """Formats a duration: `12 s`, `3 min 20 s`, `5 h 01 min`, `3 d 04 h`."""
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    for above, below, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {above} {whole % size // part:02} {below}"
    return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"


def when(seconds: float | None) -> str:
    """Formats a time in the local time zone."""
    return UNKNOWN if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def as_json(run: RunSummary) -> Mapping[str, Any]:
    """Returns what is known of a run as values of JSON."""
    best = {name: run.best(name) for name in run.metrics}
    return {
        "run": run.name,
        "path": str(run.directory.path),
        "started_unix_seconds": run.started,
        "starts": run.starts,
        "wall_seconds": run.seconds,
        "strategy": run.strategy,
        "replicas": run.replicas,
        "steps": run.steps,
        "total_steps": run.total_steps,
        "status": run.status,
        "last": {name: run.last(name) for name in run.metrics},
        "best": {name: {"step": found[0], "value": found[1]} for name, found in best.items() if found},
        "flags": dict(run.flags),
        "versions": dict(run.versions),
    }
