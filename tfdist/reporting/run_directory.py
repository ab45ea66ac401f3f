"""The directory of a run: its files, their creation, and the start of a run in it."""

import contextlib
import dataclasses
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
FIND = "find"  # results of searches for the learning rate and the batch size
_STARTS = "starts.jsonl"
_PARTIAL = ".partial"
# May exist before a run begins: logs of a launcher, searches, the lock, and a partial file of a killed process.
_ALLOWED_BEFORE = (_LOGS, FIND, "lock", f"{_STARTS}{_PARTIAL}")
# Patterns of the files that a run writes into its directories: checkpoints, also partial and damaged ones, ledgers, and events.
_FILE_NAMES = {
    "checkpoints": re.compile(r"\.?step-[0-9]{9,18}(\..*)?"),
    "ledger": re.compile(r"start-[0-9]+-rank-[0-9]+\.bin"),
    "tensorboard/train": re.compile(r"events\.out\.tfevents\..*"),
    "tensorboard/eval": re.compile(r"events\.out\.tfevents\..*"),
    "tensorboard": re.compile(r"plugins"),
}
_DIRECTORIES = (_LOGS, FIND, *_FILE_NAMES, "tensorboard/plugins", "tensorboard/plugins/profile")


class _Entry:
    """A file or a directory of a run, as an attribute of its `RunDirectory`."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, run: "RunDirectory", owner: object) -> StoragePath:
        return run.path / self._name


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The files of a run, by name. Only `create`, `begin` and `make` change anything on disk.

    Attributes:
      path: path of the directory.
    """

    path: StoragePath
    flags = _Entry("flags.txt")  # flags that repeat the run, for `--flagfile`
    environment = _Entry("environment.json")  # versions, hosts, command and machine; see `tfdist.reporting.environment`
    starts = _Entry(_STARTS)  # one line per start of the run, with its first step, flags and hosts
    end = _Entry("finished.json")  # the end of a finished run; missing before
    checkpoints = _Entry("checkpoints")  # directory of checkpoints; defined by `tfdist.checkpoint.format`
    metrics = _Entry("metrics.jsonl")  # records of the run; defined by `tfdist.reporting.schema`
    dropped = _Entry("metrics-dropped.jsonl")  # records of steps that were repeated after a checkpoint
    outcome = _Entry("outcome.json")  # outcome of the last start; missing while it is running, and after a kill
    curves = _Entry("curves.png")  # plot of loss and metrics
    all_reduce_table = _Entry("all_reduce.csv")  # the table of algorithms that `--all_reduce=auto` has measured
    timeline = _Entry(
        "timeline.png"
    )  # plot of the computation of each process of a pipeline over time, by `--profile_steps`
    model = _Entry("model.keras")  # the trained model, for Keras
    tensorboard = _Entry("tensorboard")  # directory for `tensorboard --logdir`
    loggers = _Entry("loggers.json")  # the run's ids in experiment trackers
    logs = _Entry(_LOGS)  # directory of the ranks' logs

    @property
    def _storage(self) -> Storage:
        return storage_of(self.path)

    @classmethod
    def create(
        cls,
        path: AnyPath,
        flags: str,
        hosts: Sequence[str],
        communication: str = "",
        clock: Callable[[], float] = time.time,
    ) -> "RunDirectory":
        """Creates the directory and writes flags.txt and environment.json; for the chief, once per run.

        Args:
          path: an empty or missing directory, also as the URL of another storage; it may contain `logs`, which a
            launcher creates before.
          flags: contents of flags.txt, to repeat the run.
          hosts: host name of each rank, by rank.
          communication: see `Strategy.communication`.
          clock: returns the time in seconds since 1970 (UTC).

        Raises:
          InputError: the directory is not empty, or cannot be written.
        """
        cls.check(path)
        directory = cls(path_of(path))
        directory.begin(flags, hosts, communication=communication, clock=clock)
        return directory

    def begin(
        self,
        flags: str,
        hosts: Sequence[str],
        *,
        communication: str = "",
        step: int = 0,
        checkpoint: str = "",
        evaluated: bool = True,
        facts: Mapping[str, Json] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> int:
        """Prepares the directory for a run that begins at `step`; later records are dropped, as they will be repeated.

        Args:
          flags: as in `create`.
          hosts: as in `create`.
          communication: as in `create`.
          step: number of updates done so far.
          checkpoint: checkpoint with these updates; empty for none.
          evaluated: whether an evaluation at that step has been completed; otherwise it will be repeated.
          facts: further fields of this start in starts.jsonl.
          clock: as in `create`.

        Returns:
          How many times the run was started before.

        Raises:
          InputError: the directory cannot be written.
        """
        described = environment.describe(hosts, clock(), communication)
        start = {"step": step, "checkpoint": checkpoint, **(facts or {}), "flags": flags.splitlines(), **described}
        with _writing(self.path):
            starts = self._contents(self.starts)
            self._storage.make_directory(self.logs)
            self._storage.clean_staged(self.model)
            self._drop(lambda r: r["step"] < step or (r["step"] == step and (evaluated or r["kind"] == "train")))
            if self._storage.exists(self.end):
                self._storage.remove(self.end)
            # First and atomically: if the process is killed afterwards, the run has begun, with all that the next start
            # needs.
            self._storage.replace(self.starts, starts + f"{json.dumps(start)}\n".encode())
            self._storage.replace(self.flags, flags.encode())
            self._storage.replace(self.environment, (json.dumps(described, indent=2) + "\n").encode())
        return len(starts.splitlines())

    def finish(self, facts: Mapping[str, Json]) -> None:
        """Records that the run has finished, once all its files are complete; until it begins again.

        Args:
          facts: the last step, the flags that determine the end, and the reason of the end.

        Raises:
          OSError: it cannot be written.
        """
        self._storage.replace(self.end, (json.dumps(facts) + "\n").encode())

    @property
    def finished(self) -> dict[str, Any]:
        """The facts with which the run has finished; empty if it has not."""
        facts = _json(self._contents(self.end)) if self.is_done else None
        return facts if isinstance(facts, dict) and _is_count(facts.get("step")) else {}

    def write(self, path: StoragePath, contents: bytes) -> None:
        """Writes a file of the run, such as `timeline`.

        Raises:
          InputError: it cannot be written.
        """
        with _writing(path):
            self._storage.replace(path, contents)

    def clear(self) -> None:
        """Deletes the files of the run, for one that begins again; other files, and logs, stay.

        Where it began is deleted last: if the process is killed before, the directory is still that of a run.

        Raises:
          InputError: a file cannot be deleted.
        """
        storage = self._storage
        with _writing(self.path):
            records = (self.metrics, self.dropped, self.curves, self.outcome, self.loggers, self.timeline)
            for path in (self.end, self.model, self.flags, self.environment, self.all_reduce_table, *records):
                if storage.exists(path):
                    storage.remove(path)
            for name, pattern in _FILE_NAMES.items():
                directory = self.path / name
                for entry in storage.entries(directory) if storage.is_directory(directory) else []:
                    if pattern.fullmatch(entry.name):
                        path = directory / entry.name
                        (storage.remove_directory if entry.is_directory else storage.remove)(path)
            storage.remove(self.starts)

    def _drop(self, is_kept: Callable[[dict[str, Any]], bool]) -> None:
        """Moves records from metrics.jsonl to another file, so that nothing is lost."""
        records = self._records_with_lines()
        dropped = [line for line, record in records if not is_kept(record)]
        if dropped:
            file = self._storage.append(self.dropped)
            with contextlib.closing(file):
                file.write(b"".join(dropped))
                file.sync()
        if self._storage.exists(self.metrics):
            self._storage.replace(self.metrics, b"".join(line for line, record in records if is_kept(record)))

    def _contents(self, path: StoragePath) -> bytes:
        """Returns the contents of a file; none if there is no file.

        Raises:
          InputError: it cannot be read, or is a link or not a regular file.
        """
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
        """Returns the contents of starts.jsonl; none if there is no such file.

        Raises:
          InputError: it cannot be read, or a line is not what a run writes.
        """
        starts = []
        for number, line in enumerate(self._contents(self.starts).splitlines()):
            start = _json(line)
            if not (
                isinstance(start, dict)
                and _is_count(start.get("step"))
                and all(isinstance(start.get(name, ""), str) for name in ("checkpoint", "commits", "launched"))
            ):
                raise InputError(
                    f"Each line of {self.starts} must describe a start of the run. Received: another line {number + 1}. "
                    "Restore the file, or start a run in another directory."
                )
            starts.append(start)
        return starts

    def last_flags(self) -> dict[str, str]:
        """Returns the values of the flags of the last start, as text by name; see `read_starts` for errors."""
        return flag_values((self.read_starts() or [{}])[-1].get("flags"))

    def make(self) -> None:
        """Creates the directory if it does not exist; it may be a link itself.

        Raises:
          InputError: it cannot be created, or a directory of the run in it is a link: writing would change other files.
        """
        with _writing(self.path):
            self._storage.make_directory(self.path)
        for name in _DIRECTORIES:
            if self._storage.is_link(self.path / name):
                raise _unwritable(self.path, f"{name} is a link, which is not followed")

    def records(self) -> list[dict[str, Any]]:
        """Returns the records so far, in the schema of metrics.jsonl."""
        return [record for _, record in self._records_with_lines()]

    def _records_with_lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Returns lines with their contents, up to one that is no record, as a crash may leave it."""
        records = []
        for line in self._contents(self.metrics).splitlines(keepends=True):
            record = _json(line)
            if (
                not isinstance(record, dict)
                or not _is_count(record.get("step"))
                or not isinstance(record.get("kind"), str)
            ):
                break
            records.append((line, record))
        return records

    @property
    def is_run(self) -> bool:
        """Whether a run has begun in it."""
        info = self._storage.info(self.starts)
        return info is not None and not info.is_directory

    @property
    def is_unused(self) -> bool:
        """Whether an existing directory has only files that may exist before a run, such as a launcher's logs."""
        return all(entry.name in _ALLOWED_BEFORE for entry in self._storage.entries(self.path))

    @property
    def is_done(self) -> bool:
        """Whether a run in it has finished."""
        info = self._storage.info(self.model)
        return info is not None and (info.is_directory or info.size > 0)  # empty after a failure of the machine

    @property
    def has_dropped(self) -> bool:
        """Whether records were moved to `dropped`."""
        return self._storage.exists(self.dropped)

    @property
    def has_trained(self) -> bool:
        """Whether an earlier start has made any recorded step."""
        storage, ledgers = self._storage, self.ledger(0, 0).parent
        if self.has_dropped:
            return True
        names = storage.entries(ledgers) if storage.is_directory(ledgers) else []
        files = [storage.info(ledgers / name) for name, _ in names if name.startswith("start-")]
        return any(info.size for info in files if info)

    @staticmethod
    def check(path: AnyPath) -> None:
        """Checks that a run could begin in a directory, without creating it.

        Raises:
          InputError: it is not empty, or cannot be written.
        """
        directory = path_of(path)
        storage = storage_of(directory)
        with _writing(path):
            if storage.is_directory(directory) and not RunDirectory(directory).is_unused:
                raise InputError(
                    f"The output directory must be empty or new. Received: {path}, which has files in it. Give another "
                    "--output_dir."
                )
            storage.check_writable(directory)

    def ledger(self, start: int, rank: int) -> StoragePath:
        """Returns the file with the examples that a process has used, for the n-th start of the run, from 0."""
        return self.path / "ledger" / f"start-{start}-rank-{rank}.bin"

    def log(self, rank: int) -> StoragePath:
        """Returns the log file of a rank."""
        return self.logs / f"rank-{rank}.log"


def default_path(dataset: str, model: str, ending: str) -> str:
    """Returns the path of a run's directory that is named after its data set and model, without their arguments."""
    names = (
        "".join(c if c.isalnum() or c in "._" else "_" for c in text.partition("(")[0]) for text in (dataset, model)
    )
    return f"runs/{'-'.join(names)}-{ending}"


def flag_values(lines: Any) -> dict[str, str]:
    """Returns the values of flags, as text by name, from the lines of a flag file; anything else is skipped."""
    texts = [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
    matches = [re.fullmatch(r"--(\w+)=(.*)", text, re.DOTALL) for text in texts]
    return {match[1]: match[2] for match in matches if match}


def _json(line: bytes) -> Any:
    """Returns the value of a line; None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


@contextlib.contextmanager
def _writing(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def _unwritable(path: AnyPath, reason: str) -> InputError:
    return InputError(
        f"The output directory must be writable. Received: {path} ({reason}). Give another --output_dir, or free space "
        "there, or fix its permissions."
    )
