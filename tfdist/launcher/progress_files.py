"""What the ranks of this host note for their launcher: a small file each, in memory, which somebody may empty."""

import logging
import pathlib
from collections.abc import Iterable

from tfdist.errors import InputError
from tfdist.process import progress_file

_log = logging.getLogger("tfdist.launch")


class ProgressFiles:
    """The ranks' notes. What cannot be read was not noted, and is made anew for the next attempt: a job does not end of it."""

    def __init__(self, memory: pathlib.Path):
        """Args: memory: the launcher's directory; the notes have a folder in it."""
        self._memory, self._folder = memory, memory / "notes"
        self._made: set[int] = set()  # by rank
        self._has_room = self._is_warned = False

    def blank(self, rank: int) -> pathlib.Path | None:
        """Makes the note of a rank that will start; None if there is no room any more: it notes nothing then.

        Raises:
          InputError: there is none for the first one.
        """
        path = self._path(rank)
        try:
            self._memory.mkdir(mode=0o700, exist_ok=True)
            self._folder.mkdir(exist_ok=True)
            progress_file.blank(path)
        except OSError as error:
            if not self._has_room:
                raise InputError(
                    f"The ranks' steps must find room in memory. Received: {path} ({error.strerror}). "
                    f"Free space in {self._memory.parent}."
                ) from error
            self._warn(path, error)
            self._made.discard(rank)
            return None
        self._has_room = True
        self._made.add(rank)
        return path

    def read(self, ranks: Iterable[int]) -> tuple[int | None, bool]:
        """The last step that any of these ranks has noted, None if none has; and whether one forbids any restart."""
        steps, final = [], False
        for path in map(self._path, self._made.intersection(ranks)):
            try:
                steps.append(progress_file.read(path))
                final = final or progress_file.forbids_restart(path)
            except OSError as error:
                self._warn(path, error)
        return max((step for step in steps if step is not None), default=None), final

    def _path(self, rank: int) -> pathlib.Path:
        return self._folder / f"rank-{rank}"

    def _warn(self, path: pathlib.Path, error: OSError) -> None:
        """Says it once: what follows on it is one trouble."""
        if not self._is_warned:
            _log.warning(
                "tfdist.launch: %s is missed (%s); what else the launcher keeps in %s, commits among it, may be gone, too. The "
                "job goes on without.",
                path,
                error.strerror,
                self._memory,
            )
        self._is_warned = True
