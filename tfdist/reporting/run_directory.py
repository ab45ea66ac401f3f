"""The directory of one run: what is in it, and how it begins."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist.errors import InputError
from tfdist.reporting import environment

_LOGS = "logs"


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The files of a run, by name; only `create` touches the disk.

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
        description = json.dumps(environment.describe(hosts, clock()), indent=2) + "\n"
        try:
            directory.logs.mkdir(parents=True, exist_ok=True)
            directory.flags.write_text(flags, encoding="utf-8")
            directory.environment.write_text(description, encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from error
        return directory

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
            if directory.is_dir() and any(entry.name != _LOGS for entry in directory.iterdir()):
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
    def metrics(self) -> Path:
        """The records of the run; `tfdist.reporting.schema` says what is in it."""
        return self.path / "metrics.jsonl"

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


def _unwritable(path: str | os.PathLike[str], reason: str) -> InputError:
    return InputError(
        f"The output directory must be one that can be written. Received: {os.fspath(path)} ({reason}). "
        "Give another --output_dir, or mend its permissions."
    )
