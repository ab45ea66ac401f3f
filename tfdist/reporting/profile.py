"""Writes a TensorFlow profile of some steps of a run."""

import logging

from tfdist.config.fields import parse_step_range
from tfdist.storage import AnyPath

_log = logging.getLogger(__name__)


class NullProfile:
    """Profiles nothing; used without `--profile_steps`, and on ranks other than the chief.

    `boundaries` are the steps, on all ranks, at which a call of the compiled loop must end so that the chief can profile.
    """

    def __init__(self, steps: str = ""):
        self.boundaries: tuple[int, ...] = parse_step_range(steps) if steps else ()

    def on_step(self, step: int) -> None:
        """Called with the current step, before the first call of the compiled loop and after each call."""

    def close(self) -> None:
        """Ends a running profile."""


class ProfileWindow(NullProfile):
    """Profiles B - A steps: starts after A updates and stops after B.

    A should be a few steps into the run, because the first steps are traced. A run that starts between A and B profiles the
    remaining steps. The profile is written to `directory` where TensorBoard's profile plugin expects it. `steps` is `A:B`,
    with 0 <= A < B.
    """

    def __init__(self, steps: str, directory: AnyPath):
        # Imported late, because only profiles need TensorFlow.
        import tensorflow as tf

        self._profiler = tf.profiler.experimental
        self._directory = str(directory)
        super().__init__(steps)
        self._start, self._stop = self.boundaries
        self._is_running = False

    def on_step(self, step: int) -> None:
        if self._is_running and step >= self._stop:
            self.close()
        elif not self._is_running and self._start <= step < self._stop:
            self._profiler.start(self._directory)
            self._is_running = True

    def close(self) -> None:
        if self._is_running:
            self._is_running = False
            self._profiler.stop()
            _log.info("Wrote the profile of --profile_steps=%d:%d to %s.", self._start, self._stop, self._directory)
