"""The directory of a run and its files."""

import contextlib
import dataclasses
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.coordination import Json
from tfdist.errors import InputError
from tfdist.reporting import environment
from tfdist.storage import AnyPath, Storage, StoragePath, path_of, storage_of

_LOGS = "logs"
FIND = "find"  # results of searches for the learning rate and batch size
_STARTS = "starts.jsonl"
_PARTIAL = ".partial"
# Files that may exist before a run starts: logs of a launcher, searches, the lock, and a partial file of a killed process.
_ALLOWED_FILES = (_LOGS, FIND, "lock", f"{_STARTS}{_PARTIAL}")
# Patterns of files that a run writes: checkpoints, including partial and damaged ones, ledgers, and events.
_FILE_NAMES = {
    "checkpoints": re.compile(r"\.?step-[0-9]{9,18}(\..*)?"),
    "ledger": re.compile(r"start-[0-9]+-(rank-[0-9]+\.bin|updates\.jsonl)"),
    "tensorboard/train": re.compile(r"events\.out\.tfevents\..*"),
    "tensorboard/eval": re.compile(r"events\.out\.tfevents\..*"),
    "tensorboard/evaluator/eval": re.compile(r"events\.out\.tfevents\..*"),
    "tensorboard": re.compile(r"plugins"),
}


class _Entry:
    """A file or a directory of a run, as an attribute of its `RunDirectory`."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, run: "RunDirectory", owner: object) -> StoragePath:
        return run.path / self._name


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The files of a run, by name."""

    path: StoragePath  # path of the directory
    flags = _Entry("flags.txt")  # flags that repeat the run, for `--flagfile`
    environment = _Entry("environment.json")  # versions, hosts, command and machine; see `tfdist.reporting.environment`
    starts = _Entry(_STARTS)  # one line per attempt of the run, with its first step, flags and hosts
    end = _Entry("finished.json")  # describes the end of a finished run
    checkpoints = _Entry("checkpoints")  # directory of checkpoints; defined by `tfdist.checkpoint.format`
    metrics = _Entry("metrics.jsonl")  # records of the run; defined by `tfdist.reporting.schema`
    evaluations = _Entry("evaluations.jsonl")  # records of the job's evaluator, in the same schema
    dropped = _Entry("metrics-dropped.jsonl")  # records of steps that were repeated from a checkpoint
    outcome = _Entry("outcome.json")  # outcome of the last attempt; missing while it is running or if it was killed
    curves = _Entry("curves.png")  # plot of loss and metrics
    all_reduce_table = _Entry("all_reduce.csv")  # table of algorithms measured by `--all_reduce=auto`
    timeline = _Entry("timeline.png")  # plot of the actions of a pipeline's processes, by `--profile_steps`
    model = _Entry("model.keras")  # the trained model, for Keras
    tensorboard = _Entry("tensorboard")  # directory for `tensorboard --logdir`
    loggers = _Entry("loggers.json")  # the run's ids in experiment trackers
    logs = _Entry(_LOGS)  # directory of the ranks' logs

    @property
    def _storage(self) -> Storage:
        return storage_of(self.path)

    def begin(
        self,
        flags: str,
        hosts: Sequence[str],
        *,
        communication: str = "",
        step: int = 0,
        checkpoint: str = "",
        is_evaluated: bool = True,
        facts: Mapping[str, Json] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> int:
        """Prepares the directory for a run that starts at `step`; drops later records, which will be repeated.

        Called on the chief. Creates the directory if necessary, and returns the number of earlier attempts.

        Args:
          flags: contents of flags.txt, to repeat the run.
          hosts: host name of each rank, by rank.
          communication: see `Strategy.communication`.
          step: number of updates so far.
          checkpoint: checkpoint of this step; empty for none.
          is_evaluated: whether the evaluation at this step was completed; otherwise it will be repeated.
          facts: further fields of this attempt in starts.jsonl.
          clock: returns the time in seconds since 1970 (UTC).
        """
        fields = environment.describe(hosts, clock(), communication)
        start = {"step": step, "checkpoint": checkpoint, **(facts or {}), "flags": flags.splitlines(), **fields}
        with _reraise_as_input_error(self.path):
            starts = self._contents(self.starts)
            self._storage.make_directory(self.logs)
            self._storage.clean_staged(self.model)
            self._drop_records(
                lambda r: r["step"] < step or (r["step"] == step and (is_evaluated or r["kind"] == "train"))
            )
            if self._storage.exists(self.end):
                self._storage.remove(self.end)
            # First and atomically: this file has everything that the next attempt needs if this process is killed.
            self._storage.replace(self.starts, starts + f"{json.dumps(start)}\n".encode())
            self._storage.replace(self.flags, flags.encode())
            self._storage.replace(self.environment, (json.dumps(fields, indent=2) + "\n").encode())
        return len(starts.splitlines())

    def finish(self, facts: Mapping[str, Json]) -> None:
        """Records that the run has finished and all its files are complete.

        The facts are the last step, the flags that determine the end, and the reason for the end.
        """
        self._storage.replace(self.end, (json.dumps(facts) + "\n").encode())

    @property
    def end_record(self) -> dict[str, Any]:
        """The facts passed to `finish`; empty if the run has not finished."""
        return (_json(self._contents(self.end)) or {}) if self.is_done else {}

    @property
    def outcome_record(self) -> dict[str, Any]:
        """The outcome of the last attempt; empty if there is none."""
        return _json(self._contents(self.outcome)) or {}

    def write(self, path: StoragePath, contents: bytes) -> None:
        """Writes a file of the run, such as `timeline`; raises `InputError` if it cannot."""
        with _reraise_as_input_error(path):
            self._storage.replace(path, contents)

    def clear(self) -> None:
        """Deletes the files of the run, except logs; other files are kept.

        starts.jsonl is deleted last: if the process is killed before that, the directory still contains a run.

        Raises:
          InputError: a file cannot be deleted.
        """
        storage = self._storage
        with _reraise_as_input_error(self.path):
            first = (self.end, self.model, self.flags, self.environment, self.all_reduce_table, self.metrics)
            others = (self.evaluations, self.dropped, self.curves, self.outcome, self.loggers, self.timeline)
            for path in (*first, *others):
                if storage.exists(path):
                    storage.remove(path)
            for name, pattern in _FILE_NAMES.items():
                directory = self.path / name
                for entry in storage.entries(directory) if storage.is_directory(directory) else []:
                    if pattern.fullmatch(entry.name):
                        path = directory / entry.name
                        (storage.remove_directory if entry.is_directory else storage.remove)(path)
            storage.remove(self.starts)

    def _drop_records(self, is_kept: Callable[[dict[str, Any]], bool]) -> None:
        records = self._records_with_lines(self.metrics)
        dropped_lines = [line for line, record in records if not is_kept(record)]
        if dropped_lines:
            file = self._storage.append(self.dropped)
            with contextlib.closing(file):
                file.write(b"".join(dropped_lines))
                file.sync()
        if self._storage.exists(self.metrics):
            self._storage.replace(self.metrics, b"".join(line for line, record in records if is_kept(record)))

    def _contents(self, path: StoragePath) -> bytes:
        """Returns the contents of a file, empty if it does not exist; raises `InputError` if it cannot be read."""
        try:
            return self._storage.read(path)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            raise InputError(
                f"A file of a run must be readable. Received: {path} ({error.strerror}). Restore the file, or start a run in "
                "another directory."
            ) from error

    def read_starts(self) -> list[dict[str, Any]]:
        """Returns the contents of starts.jsonl, empty if there is none; raises `InputError` if a line is invalid."""
        lines = self._contents(self.starts).splitlines()
        starts = [start for line in lines if (start := _json(line))]
        if len(starts) < len(lines):
            raise InputError(
                f"Each line of {self.starts} must describe an attempt of the run. Received: a line that is not JSON. Restore "
                "the file, or start a run in another directory."
            )
        return starts

    def read_updates(self) -> list[dict[str, Any]]:
        """Returns the updates of parameter servers that count for the result, in order; empty if there is no record of them.

        If a later attempt has repeated an update, its own is returned. The list ends before the first gap.
        """
        updates: dict[int, dict[str, Any]] = {}  # by version
        for index, start in enumerate(self.read_starts()):
            updates = {version: update for version, update in updates.items() if version < start["step"]}
            records = self._records_with_lines(self.updates(index))
            updates |= {update["version"]: update for line, update in records if line.endswith(b"\n")}
        first = min(updates, default=0)
        count = next(count for count in itertools.count() if first + count not in updates)
        return [updates[version] for version in range(first, first + count)]

    def last_flags(self) -> dict[str, str]:
        """Returns the values of the flags of the last attempt, as text by name; see `read_starts` for errors."""
        return flag_values((self.read_starts() or [{}])[-1].get("flags", []))

    def make(self) -> None:
        """Creates the directory if it does not exist; raises `InputError` if it cannot."""
        with _reraise_as_input_error(self.path):
            self._storage.make_directory(self.path)

    def records(self) -> list[dict[str, Any]]:
        """Returns the records so far, in the schema of metrics.jsonl."""
        return [record for _, record in self._records_with_lines(self.metrics)]

    def evaluator_records(self) -> list[dict[str, Any]]:
        """Returns the records of the job's evaluator so far, in the order in which it has evaluated."""
        return [record for _, record in self._records_with_lines(self.evaluations)]

    def all_records(self) -> list[dict[str, Any]]:
        """Returns the records of the run and of its evaluator, in the order of steps."""
        return sorted([*self.records(), *self.evaluator_records()], key=lambda record: record["step"])

    def _records_with_lines(self, file: StoragePath) -> list[tuple[bytes, dict[str, Any]]]:
        """Returns lines with their records, up to the first invalid line, which a crash may have left."""
        records = []
        for line in self._contents(file).splitlines(keepends=True):
            record = _json(line)
            if record is None:
                break
            records.append((line, record))
        return records

    @property
    def is_run(self) -> bool:
        """Whether the directory contains a run."""
        info = self._storage.info(self.starts)
        return info is not None and not info.is_directory

    @property
    def is_unused(self) -> bool:
        """Whether an existing directory has only files that may exist before a run, such as logs of a launcher."""
        return all(entry.name in _ALLOWED_FILES for entry in self._storage.entries(self.path))

    @property
    def is_done(self) -> bool:
        """Whether the directory contains a finished run."""
        info = self._storage.info(self.model)
        return info is not None and (info.is_directory or info.size > 0)  # empty after a failure of the machine

    @property
    def has_dropped(self) -> bool:
        """Whether records have been moved to `dropped`."""
        return self._storage.exists(self.dropped)

    @property
    def has_trained(self) -> bool:
        """Whether an earlier attempt has recorded any step."""
        storage, ledgers = self._storage, self.ledger(0, 0).parent
        if self.has_dropped:
            return True
        names = storage.entries(ledgers) if storage.is_directory(ledgers) else []
        files = [storage.info(ledgers / name) for name, _ in names if name.startswith("start-")]
        return any(info.size for info in files if info)

    @classmethod
    def check(cls, path: AnyPath) -> "RunDirectory":
        """Returns the directory for a run, without creating it.

        Raises:
          InputError: it is not empty, or cannot be written.
        """
        run = cls(path_of(path))
        with _reraise_as_input_error(path):
            if run._storage.is_directory(run.path) and not run.is_unused:
                raise InputError(
                    f"The output directory must be empty or new. Received: {path}, which contains files. Specify another "
                    "--output_dir."
                )
            run._storage.check_writable(run.path)
        return run

    def ledger(self, start: int, rank: int) -> StoragePath:
        """Returns the file with the examples that a process has used in an attempt of the run, numbered from 0."""
        return self.path / "ledger" / f"start-{start}-rank-{rank}.bin"

    def updates(self, start: int) -> StoragePath:
        """Returns the file with the updates that parameter servers have made in an attempt of the run."""
        return self.path / "ledger" / f"start-{start}-updates.jsonl"

    def log(self, rank: int) -> StoragePath:
        """Returns the log file of a rank."""
        return self.logs / f"rank-{rank}.log"


def default_path(dataset: str, model: str, ending: str) -> str:
    """Returns a path for a run's directory, named after its dataset and model, without their arguments."""
    names = (
        "".join(c if c.isalnum() or c in "._" else "_" for c in text.partition("(")[0]) for text in (dataset, model)
    )
    return f"runs/{'-'.join(names)}-{ending}"


def flag_values(lines: Sequence[str]) -> dict[str, str]:
    """Returns the values of flags, as text by name, from the lines of a flag file; other lines are ignored."""
    matches = [re.fullmatch(r"--(\w+)=(.*)", line, re.DOTALL) for line in lines]
    return {match[1]: match[2] for match in matches if match}


def _json(line: bytes) -> dict[str, Any] | None:
    """Returns the object on a line; None if a crash has left it incomplete."""
    try:
        return json.loads(line)
    except ValueError:
        return None


@contextlib.contextmanager
def _reraise_as_input_error(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"The output directory must be writable. Received: {path} ({error.strerror or error}). Specify another "
            "--output_dir, or free up space there, or fix its permissions."
        ) from error
