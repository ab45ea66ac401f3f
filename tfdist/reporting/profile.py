"""A TensorFlow profile of some steps of a run."""

import logging
import os

from tfdist.errors import InputError

_log = logging.getLogger(__name__)


class NullProfile:
    """Profiles nothing: what a run without `--profile_steps`, and the ranks other than the chief, use.

    Attributes:
      boundaries: steps at which a compiled call must end, so that `at` is called there.
    """

    boundaries: tuple[int, ...] = ()

    def at(self, step: int) -> None:
        """Learns that `step` updates are done: called before the first compiled call and after each."""

    def close(self) -> None:
        """Ends a profile that is still being taken."""


class ProfileWindow(NullProfile):
    """Profiles the steps from A to B: starts when A updates are done, stops when B are, so it sees B - A steps.

    Take A a few steps into the run, or the profile shows tracing instead of training. A run that begins between A and
    B profiles what is left. The profile lands below the directory, where TensorBoard's profile plugin looks for it.

    Args:
      steps: `A:B`, with 0 <= A < B.
      directory: where the profile goes; a TensorBoard log directory.

    Raises:
      InputError: `steps` is not of that form.
    """

    def __init__(self, steps: str, directory: str | os.PathLike[str]):
        # Only who takes a profile needs TensorFlow here.
        import tensorflow as tf

        self._profiler = tf.profiler.experimental
        self._directory = os.fspath(directory)
        self._start, self._stop = self.boundaries = parse_steps(steps)
        self._running = False

    def at(self, step: int) -> None:
        """See base class."""
        if self._running and step >= self._stop:
            self.close()
        elif not self._running and self._start <= step < self._stop:
            self._profiler.start(self._directory)
            self._running = True

    def close(self) -> None:
        """See base class."""
        if self._running:
            self._running = False
            self._profiler.stop()
            _log.info("Wrote a profile of steps %d to %d to %s.", self._start, self._stop, self._directory)


def parse_steps(steps: str) -> tuple[int, int]:
    """Returns (A, B) of `A:B`.

    Raises:
      InputError: it is not two whole numbers with 0 <= A < B.
    """
    start, _, stop = steps.partition(":")
    if not (start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise InputError(
            f"--profile_steps must be A:B with whole numbers 0 <= A < B. Received: {steps!r}. "
            "For ten steps after the first hundred, write 100:110."
        )
    return int(start), int(stop)
