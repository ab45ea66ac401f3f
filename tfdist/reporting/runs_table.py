"""Tables of runs and of their differences, as lines of text."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.reporting.plain_reporter import printable, rounded
from tfdist.reporting.run_summary import RunSummary

_NOT_COMPARED = ("output_dir",)
_MAIN = ("strategy", "model", "dataset")
UNKNOWN = "-"


def columns(metric: str) -> dict[str, Callable[[RunSummary], str]]:
    """Returns the columns of the table: a function of a run by title.

    Args:
      metric: metric to show beside the loss.
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


def table(runs: Sequence[RunSummary], metric: str) -> list[str]:
    """Returns the lines of the table of runs."""
    cells = columns(metric)
    return aligned([list(cells), *([cell(run) for cell in cells.values()] for run in runs)])


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
