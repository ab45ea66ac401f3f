"""The directory of one run: what is in it, how it begins, and how it goes on."""

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
_BEFORE = (_LOGS, "lock", f"{_STARTS}{_PARTIAL}")  # what a launcher writes, who begins, and who was killed beginning


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The files of a run, by name. `create`, `begin` and `make` write; nothing else changes the disk.

    Attributes:
      path: the directory.
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
        """Makes the directory and writes flags.txt and environment.json: for the chief, once a run.

        Args:
          path: a directory that is empty or is not there yet; `logs` may be in it, for a launcher writes there first.
          flags: the text of flags.txt, which reproduces the run.
          hosts: the host name of each rank, by rank.
          clock: seconds since 1970 (UTC).

        Raises:
          InputError: the directory holds something, or cannot be written.
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
        """Makes the directory ready for a run that begins with `step`: what was recorded behind it will be made again.

        Args:
          flags: as for `create`.
          hosts: as for `create`.
          step: updates done so far.
          checkpoint: where they come from; empty for none.
          evaluated: whether an evaluation at that step belongs to what was done; else it will be made again.
          facts: what else starts.jsonl says of this start.
          clock: as for `create`.

        Returns:
          How often the run began before.

        Raises:
          InputError: the directory cannot be written.
        """
        described = environment.describe(hosts, clock())
        start = {"step": step, "checkpoint": checkpoint, **(facts or {}), "flags": flags.splitlines(), **described}
        try:
            starts = self.starts.read_text(encoding="utf-8") if self.starts.exists() else ""
            self.logs.mkdir(parents=True, exist_ok=True)
            self._drop(lambda r: r["step"] < step or (r["step"] == step and (evaluated or r["kind"] == "train")))
            # First and in one piece: who is killed behind it has begun, with all that the next start asks for.
            _replace(self.starts, f"{starts}{json.dumps(start)}\n")
            _replace(self.flags, flags)
            _replace(self.environment, json.dumps(described, indent=2) + "\n")
        except OSError as error:
            raise _unwritable(self.path, error.strerror or str(error)) from error
        return len(starts.splitlines())

    def _drop(self, stays: Callable[[dict[str, Any]], bool]) -> None:
        """Takes records out of metrics.jsonl; they are kept in another file, as nothing is thrown away."""
        recorded = self._recorded()
        dropped = [line for line, record in recorded if not stays(record)]
        if dropped:
            with open(self.dropped, "a", encoding="utf-8") as file:
                file.writelines(dropped)
        if self.metrics.exists():
            _replace(self.metrics, "".join(line for line, record in recorded if stays(record)))

    def beginnings(self) -> list[dict[str, Any]]:
        """What starts.jsonl says.

        Raises:
          OSError: it cannot be read.
        """
        return [json.loads(line) for line in self.starts.read_text(encoding="utf-8").splitlines()]

    def make(self) -> None:
        """Makes the directory, if it is not there.

        Raises:
          InputError: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error.strerror or str(error)) from error

    def records(self) -> list[dict[str, Any]]:
        """What was recorded so far, in the schema of metrics.jsonl."""
        return [record for _, record in self._recorded()]

    def _recorded(self) -> list[tuple[str, dict[str, Any]]]:
        """Lines and what they say, up to a line that a crash left unfinished."""
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
        """Whether a run has come to its end in it."""
        return self.model.exists()

    @property
    def has_trained(self) -> bool:
        """Whether there is a trace of a step that a start before this one has made."""
        ledgers = self.ledger(0, 0).parent.glob("start-*")
        return self.dropped.exists() or any(path.stat().st_size for path in ledgers)

    @staticmethod
    def check(path: str | os.PathLike[str]) -> None:
        """Makes sure that a run could begin in a directory, without making it.

        Raises:
          InputError: it holds something, or cannot be written.
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
        """The flags that reproduce the run, for `--flagfile`."""
        return self.path / "flags.txt"

    @property
    def environment(self) -> Path:
        """Versions, hosts, command and machine; `tfdist.reporting.environment` says what is in it."""
        return self.path / "environment.json"

    @property
    def starts(self) -> Path:
        """One line for each time that the run began or went on: from which step, with which flags, where."""
        return self.path / _STARTS

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints; `tfdist.checkpoint.storage` says what is in it."""
        return self.path / "checkpoints"

    def ledger(self, start: int, rank: int) -> Path:
        """Returns the file in which a process has what examples it used, for the n-th start of the run, from 0."""
        return self.path / "ledger" / f"start-{start}-rank-{rank}.bin"

    @property
    def metrics(self) -> Path:
        """The records of the run; `tfdist.reporting.schema` says what is in it."""
        return self.path / "metrics.jsonl"

    @property
    def dropped(self) -> Path:
        """Records of steps that were made again because the run stopped behind its last checkpoint."""
        return self.path / "metrics-dropped.jsonl"

    @property
    def curves(self) -> Path:
        """A picture of loss and metrics."""
        return self.path / "curves.png"

    @property
    def model(self) -> Path:
        """The trained model, which Keras loads."""
        return self.path / "model.keras"

    @property
    def tensorboard(self) -> Path:
        """What to give to `tensorboard --logdir`."""
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        """The directory of the ranks' logs."""
        return self.path / _LOGS

    def log(self, rank: int) -> Path:
        """Returns the log file of a rank."""
        return self.logs / f"rank-{rank}.log"


def _replace(path: Path, text: str) -> None:
    """Writes a file in one piece: a crash leaves the old one or the new one."""
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
