"""The directory of a run: its files, and how it is created and resumed."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.coordination import Json
from tfdist.errors import InputError
from tfdist.reporting import environment

_LOGS = "logs"
_STARTS = "starts.jsonl"
_PARTIAL = ".partial"
# From a launcher, the process that begins, and one that was killed meanwhile.
_BEFORE = (_LOGS, "lock", f"{_STARTS}{_PARTIAL}")


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The files of a run, by name. Only `create`, `begin` and `make` change anything on disk.

    Attributes:
      path: path of the directory.
    """

    path: Path

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        flags: str,
        hosts: Sequence[str],
        clock: Callable[[], float] = time.time,
    ) -> "RunDirectory":
        """Creates the directory and writes flags.txt and environment.json; for the chief, once per run.

        Args:
          path: an empty or missing directory; it may contain `logs`, which a launcher creates before.
          flags: contents of flags.txt, to repeat the run.
          hosts: host name of each rank, by rank.
          clock: returns the time in seconds since 1970 (UTC).

        Raises:
          InputError: the directory is not empty, or cannot be written.
        """
        cls.check(path)
        directory = cls(Path(path).expanduser())
        directory.begin(flags, hosts, clock=clock)
        return directory

    def begin(
        self,
        flags: str,
        hosts: Sequence[str],
        *,
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
        described = environment.describe(hosts, clock())
        start = {"step": step, "checkpoint": checkpoint, **(facts or {}), "flags": flags.splitlines(), **described}
        try:
            starts = self.starts.read_text(encoding="utf-8") if self.starts.exists() else ""
            self.logs.mkdir(parents=True, exist_ok=True)
            self._drop(lambda r: r["step"] < step or (r["step"] == step and (evaluated or r["kind"] == "train")))
            # First and atomically: if the process is killed afterwards, the run has begun, with all that the next start
            # needs.
            _replace(self.starts, f"{starts}{json.dumps(start)}\n")
            _replace(self.flags, flags)
            _replace(self.environment, json.dumps(described, indent=2) + "\n")
        except OSError as error:
            raise _unwritable(self.path, error.strerror or str(error)) from error
        return len(starts.splitlines())

    def _drop(self, stays: Callable[[dict[str, Any]], bool]) -> None:
        """Moves records from metrics.jsonl to another file, so that nothing is lost."""
        recorded = self._recorded()
        dropped = [line for line, record in recorded if not stays(record)]
        if dropped:
            with open(self.dropped, "a", encoding="utf-8") as file:
                file.writelines(dropped)
        if self.metrics.exists():
            _replace(self.metrics, "".join(line for line, record in recorded if stays(record)))

    def beginnings(self) -> list[dict[str, Any]]:
        """Returns the contents of starts.jsonl.

        Raises:
          OSError: it cannot be read.
        """
        return [json.loads(line) for line in self.starts.read_text(encoding="utf-8").splitlines()]

    def make(self) -> None:
        """Creates the directory if it does not exist.

        Raises:
          InputError: it cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error.strerror or str(error)) from error

    def records(self) -> list[dict[str, Any]]:
        """Returns the records so far, in the schema of metrics.jsonl."""
        return [record for _, record in self._recorded()]

    def _recorded(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns lines with their contents, up to one that a crash has left incomplete."""
        found = []
        text = self.metrics.read_text(encoding="utf-8") if self.metrics.exists() else ""
        for line in text.splitlines(keepends=True):
            try:
                found.append((line, json.loads(line)))
            except ValueError:
                break
        return found

    @property
    def is_run(self) -> bool:
        """Whether a run has begun in it."""
        return self.starts.is_file()

    @property
    def is_done(self) -> bool:
        """Whether a run in it has finished."""
        return self.model.exists()

    @property
    def has_trained(self) -> bool:
        """Whether an earlier start has made any recorded step."""
        ledgers = self.ledger(0, 0).parent.glob("start-*")
        return self.dropped.exists() or any(path.stat().st_size for path in ledgers)

    @staticmethod
    def check(path: str | os.PathLike[str]) -> None:
        """Checks that a run could begin in a directory, without creating it.

        Raises:
          InputError: it is not empty, or cannot be written.
        """
        if "://" in os.fspath(path):
            raise _unwritable(path, "not a directory of this machine")
        directory = Path(path).expanduser()
        try:
            if directory.is_dir() and any(entry.name not in _BEFORE for entry in directory.iterdir()):
                raise InputError(
                    "The output directory must be empty or not there yet. "
                    f"Received: {os.fspath(path)}, which has files in it. Give another --output_dir."
                )
            nearest = next(place for place in (directory, *directory.absolute().parents) if place.exists())
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from error
        if not nearest.is_dir():
            raise _unwritable(path, f"{nearest} is not a directory")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise _unwritable(path, f"no permission to write in {nearest}")

    @property
    def flags(self) -> Path:
        """Flags that repeat the run, for `--flagfile`."""
        return self.path / "flags.txt"

    @property
    def environment(self) -> Path:
        """Versions, hosts, command and machine; defined by `tfdist.reporting.environment`."""
        return self.path / "environment.json"

    @property
    def starts(self) -> Path:
        """One line per start of the run, with its first step, flags and hosts."""
        return self.path / _STARTS

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints; defined by `tfdist.checkpoint.storage`."""
        return self.path / "checkpoints"

    def ledger(self, start: int, rank: int) -> Path:
        """Returns the file with the examples that a process has used, for the n-th start of the run, from 0."""
        return self.path / "ledger" / f"start-{start}-rank-{rank}.bin"

    @property
    def metrics(self) -> Path:
        """Records of the run; defined by `tfdist.reporting.schema`."""
        return self.path / "metrics.jsonl"

    @property
    def dropped(self) -> Path:
        """Records of steps that were repeated because the run stopped after its last checkpoint."""
        return self.path / "metrics-dropped.jsonl"

    @property
    def curves(self) -> Path:
        """Plot of loss and metrics."""
        return self.path / "curves.png"

    @property
    def model(self) -> Path:
        """The trained model, for Keras."""
        return self.path / "model.keras"

    @property
    def tensorboard(self) -> Path:
        """Directory for `tensorboard --logdir`."""
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        """Directory of the ranks' logs."""
        return self.path / _LOGS

    def log(self, rank: int) -> Path:
        """Returns the log file of a rank."""
        return self.logs / f"rank-{rank}.log"


def _replace(path: Path, text: str) -> None:
    """Writes a file atomically: after a crash, it has either the old or the new contents."""
    partial = path.with_name(f"{path.name}{_PARTIAL}")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _unwritable(path: str | os.PathLike[str], reason: str) -> InputError:
    return InputError(
        f"The output directory must be one that can be written. Received: {os.fspath(path)} ({reason}). "
        "Give another --output_dir, or free space there, or mend its permissions."
    )
