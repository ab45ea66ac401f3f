"""Reads what the files of a run's directory say of it, whether or not they are complete."""

import dataclasses
import datetime
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import InputError
from tfdist.reporting.run_directory import RunDirectory
from tfdist.reporting.schema import EVAL, main_metrics, number
from tfdist.storage import StoragePath, storage_of

_LOCK = "lock"
# As in Keras's callbacks, the direction of a metric follows from its name.
_HIGHER_IS_BETTER = re.compile(
    r"acc|auc|precision|recall|(^|_)f(1|beta|measure)|iou|(^|_)r2|cosine_similarity|top_?k|bleu|dice|hit"
)
FINISHED, RUNNING, KILLED = "finished", "running", "killed"


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A run, as far as its files say.

    Attributes:
      name: name of the run: that of its directory, below the one that was given.
      directory: the directory.
      flags: flags of its last start, as text by name.
      versions: versions of packages, by name.
      strategy: its strategy; empty if unknown.
      replicas: number of replicas; None if unknown.
      started: time of its first start, in seconds since 1970 (UTC); None if unknown.
      starts: number of its starts.
      seconds: wall time of all its starts; None if unknown.
      steps: number of updates done, according to its records.
      total_steps: step at which it ends, according to its flags; None if unknown.
      status: finished, running, killed, or how it ended: interrupted, preempted, failed, loss not finite, ...
      records: its records, in the schema of metrics.jsonl.
    """

    name: str
    directory: RunDirectory
    flags: Mapping[str, str]
    versions: Mapping[str, str]
    strategy: str
    replicas: int | None
    started: float | None
    starts: int
    seconds: float | None
    steps: int
    total_steps: int | None
    status: str
    records: Sequence[Mapping[str, Any]]

    @property
    def metrics(self) -> list[str]:
        """Names of what was evaluated, the loss first; of what was trained if nothing was."""
        records = self.evaluations or self.records
        return list(dict.fromkeys(name for record in records for name in ("loss", *main_metrics(record))))

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """Its evaluations."""
        return [record for record in self.records if record["kind"] == EVAL]

    def last(self, metric: str) -> float | None:
        """Returns the last evaluated value of a metric; None if there is none."""
        values = self.points(metric, EVAL)
        return values[-1][1] if values else None

    def best(self, metric: str) -> tuple[int, float] | None:
        """Returns the step and the value of the best evaluation; None if there is none."""
        return best_evaluation(self.records, metric)

    def points(self, metric: str, kind: str) -> list[tuple[int, float]]:
        """Returns the values of a metric by step, of records of a kind."""
        return _points(self.records, metric, kind)


def best_evaluation(records: Sequence[Mapping[str, Any]], metric: str) -> tuple[int, float] | None:
    """Returns the step and the value of the best evaluation in records; None if there is none."""
    values = [(step, value) for step, value in _points(records, metric, EVAL) if math.isfinite(value)]
    if not values:
        return None
    return (max if is_higher_better(metric) else min)(values, key=lambda point: point[1])


def _points(records: Sequence[Mapping[str, Any]], metric: str, kind: str) -> list[tuple[int, float]]:
    found = [(record["step"], number(record.get(metric))) for record in records if record["kind"] == kind]
    return [(step, value) for step, value in found if value is not None]


def is_higher_better(metric: str) -> bool:
    """Returns whether higher values of a metric are better, by its name, as in Keras's callbacks."""
    return metric != "loss" and "loss" not in metric and _HIGHER_IS_BETTER.search(metric.lower()) is not None


def read_run(path: StoragePath, name: str) -> RunSummary:
    """Reads the files of a run's directory; changes nothing.

    Raises:
      InputError: no run has begun in it, or its starts.jsonl is damaged.
      OSError: a file cannot be read.
    """
    directory = RunDirectory(path)
    if not directory.is_run:
        raise InputError("it is not the directory of a run")
    starts = directory.beginnings()
    if not starts:
        raise InputError("its starts.jsonl is empty")
    last, records = starts[-1], directory.records()
    outcome = _outcome(directory)
    flags = _flags(last)
    steps, total = max([int(last["step"]), *(record["step"] for record in records)]), _total_steps(flags, last)
    times = [_time(start.get("started")) for start in starts]
    return RunSummary(
        name=name,
        directory=directory,
        flags=flags,
        versions=_texts(last.get("versions")),
        strategy=str(last.get("strategy") or flags.get("strategy", "")),
        replicas=_count(last.get("replicas")),
        started=times[0],
        starts=len(starts),
        seconds=_seconds(times, [*records, outcome]),
        steps=steps,
        total_steps=total,
        status=_status(directory, str(outcome.get("outcome", ""))),
        records=records,
    )


def _status(directory: RunDirectory, outcome: str) -> str:
    if _is_locked(directory):
        return RUNNING
    if outcome == "done" or directory.finished:
        return FINISHED
    return outcome or KILLED


def _is_locked(directory: RunDirectory) -> bool:
    """Returns whether a process is writing to the directory.

    A process clears the lock file when it releases the lock, so that the lock itself is tried only if the file says that
    it is held, which may be because the process was killed.
    """
    path = directory.path / _LOCK
    storage = storage_of(path)
    try:
        if not storage.exists(path) or not storage.read(path).strip():
            return False
        with storage.lock(path):
            return False
    except BlockingIOError:
        return True
    except OSError:  # not ours to lock: the file says that somebody does
        return True


def _outcome(directory: RunDirectory) -> dict[str, Any]:
    storage = storage_of(directory.outcome)
    try:
        found = json.loads(storage.read(directory.outcome))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _flags(start: Mapping[str, Any]) -> dict[str, str]:
    lines = start.get("flags")
    named = re.compile(r"--(\w+)=(.*)", re.DOTALL)
    found = [named.fullmatch(line) for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
    return {match[1]: match[2] for match in found if match}


def _texts(value: Any) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _time(text: Any) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _seconds(begins: Sequence[float | None], records: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the time from each start to the last record before the next one, in total."""
    known = [begin for begin in begins if begin is not None]
    times = [time for record in records if (time := number(record.get("time"))) is not None and math.isfinite(time)]
    total = 0.0
    for begin, end in itertools.pairwise([*known, math.inf]):
        total += max([time for time in times if begin <= time < end], default=begin) - begin
    return total or None


def _total_steps(flags: Mapping[str, str], start: Mapping[str, Any]) -> int | None:
    try:
        steps, epochs = int(flags.get("steps", 0)), int(flags.get("epochs", 0))
        batch_size, examples = int(start["batch_size"]), int(start["examples"])
        return steps or math.ceil(epochs * examples / batch_size) or None
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return None
