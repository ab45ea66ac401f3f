"""Progress files of the ranks of this host: small files in memory that the launcher reads."""

import logging
import pathlib
from collections.abc import Iterable

from tfdist.errors import InputError
from tfdist.process import progress_file

_log = logging.getLogger("tfdist.launch")


class ProgressFiles:
    """The progress files of the ranks.

    A file that cannot be read counts as empty, and is created again for the next attempt; it does not end the job.
    Other programs may delete files in memory.
    """

    def __init__(self, memory: pathlib.Path):
        """Initializes with the launcher's directory in memory, in which the files get a folder."""
        self._memory, self._folder = memory, memory / "notes"
        self._made: set[int] = set()  # by rank
        self._has_room = self._is_warned = False

    def blank(self, rank: int) -> pathlib.Path | None:
        """Creates the file of a rank that is about to start.

        Returns:
          Its path; None if there is no memory left, and the rank records nothing.

        Raises:
          InputError: there is no memory for the first file.
        """
        path = self._path(rank)
        try:
            self._memory.mkdir(mode=0o700, exist_ok=True)
            self._folder.mkdir(exist_ok=True)
            progress_file.blank(path)
        except OSError as error:
            if not self._has_room:
                raise InputError(
                    f"The ranks' progress files must fit in memory. Received: {path} ({error.strerror}). Free space in "
                    f"{self._memory.parent}."
                ) from error
            self._warn(path, error)
            self._made.discard(rank)
            return None
        self._has_room = True
        self._made.add(rank)
        return path

    def read(self, ranks: Iterable[int]) -> tuple[int | None, bool]:
        """Returns the last step that any of the ranks has recorded, or None, and whether one forbids a restart."""
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
        """Warns once, because later failures have the same cause."""
        if not self._is_warned:
            _log.warning(
                "tfdist launch: %s is missing (%s); other files of the launcher in %s, including commits, may be "
                "missing, too. The job continues without them.",
                path,
                error.strerror,
                self._memory,
            )
        self._is_warned = True
