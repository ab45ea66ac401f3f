"""Takes a TensorFlow profile of some steps of a run."""

import logging

from tfdist.config.fields import parse_step_range
from tfdist.storage import AnyPath

_log = logging.getLogger(__name__)


class NullProfile:
    """Profiles nothing; used without `--profile_steps`, and on ranks other than the chief.

    Attributes:
      boundaries: steps at which a compiled call must end, the same on all ranks.
    """

    boundaries: tuple[int, ...] = ()

    @classmethod
    def with_boundaries(cls, steps: str) -> "NullProfile":
        """Returns the profile of a rank whose chief profiles these steps: its calls end at the same steps."""
        profile = cls()
        profile.boundaries = parse_step_range(steps)
        return profile

    def at(self, step: int) -> None:
        """Called with the number of updates done, before the first compiled call and after each."""

    def close(self) -> None:
        """Ends a profile that is being taken."""


class ProfileWindow(NullProfile):
    """Profiles the steps from A to B: starts after A updates and stops after B, so it contains B - A steps.

    A should be a few steps into the run, or the profile shows tracing instead of training. A run that begins between A
    and B profiles the rest. The profile is written where TensorBoard's profile plugin expects it.

    Args:
      steps: `A:B`, with 0 <= A < B.
      directory: a TensorBoard log directory, which TensorFlow itself must be able to write.

    Raises:
      InputError: `steps` is invalid.
    """

    def __init__(self, steps: str, directory: AnyPath):
        # Imported late, because only profiles need TensorFlow here.
        import tensorflow as tf

        self._profiler = tf.profiler.experimental
        self._directory = str(directory)
        self._start, self._stop = self.boundaries = parse_step_range(steps)
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
