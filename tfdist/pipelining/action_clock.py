"""Readings of the clock at the start and the end of each action of a schedule, inside a compiled step."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.distribution.clock import time_after


class ActionClock:
    """Notes when the actions of this process begin and end, while they are traced.

    An action begins when the action before it has ended and its message has been received, and ends when its results are
    available. The order of actions is the same as without a clock. On a GPU, times are those at which kernels are started.
    """

    def __init__(self) -> None:
        self._times: list[tf.Tensor] = []

    def begin(self, before: Sequence[tf.Tensor], received: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what the next action must wait for: a reading that follows these tensors."""
        self._times.append(time_after([*before, *received]))
        return self._times[-1:]

    def end(self, results: Sequence[tf.Tensor]) -> None:
        """Reads the clock when the results of an action are available."""
        self._times.append(time_after(results))

    def read(self) -> tf.Tensor:
        """Returns start and end of each action, [actions, 2] float64, in seconds since the epoch."""
        return tf.reshape(tf.stack(self._times), [-1, 2])


class NoClock(ActionClock):
    """Reads no clock: nothing is added to the graph."""

    def begin(self, before: Sequence[tf.Tensor], received: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See base class."""
        return list(before)

    def end(self, results: Sequence[tf.Tensor]) -> None:
        """See base class."""
