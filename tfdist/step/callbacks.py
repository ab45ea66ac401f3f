"""Keras callbacks in a job of several processes: the same logs everywhere, files by the chief, one stop for all."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError

WRITE_FILES = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)


class Callbacks:
    """A list of Keras callbacks for one process of the job."""

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], model: keras.Model, strategy: Strategy, **params: Any
    ):
        """Args: callbacks: as given on every process; params: what Keras tells them (`epochs`, `steps`)."""
        model.stop_training = False
        self._model = model
        self._group = strategy.group
        # Also where only some have them, as in `callbacks=[...] if rank == 0 else []`.
        self._any = any(strategy.group.gather("callbacks/any", bool(callbacks), deadline=float("inf")))
        self._list = keras.callbacks.CallbackList(chosen(callbacks, strategy), model=model, **params)

    def __getattr__(self, name: str) -> Any:
        """The events of `keras.callbacks.CallbackList`."""
        return getattr(self._list, name)

    def stopped(self, step: int) -> bool:
        """Whether a callback of any process wants training to stop; asked by all processes at the same step."""
        if not self._any:
            return False
        mine = bool(self._model.stop_training)
        # A callback may last, on the chief alone as well; that none lasts for ever is for those to see who watch.
        everyone = self._group.gather(f"callbacks/stop/{step}", mine, deadline=float("inf"))
        self._model.stop_training = any(everyone)
        return self._model.stop_training


def chosen(
    callbacks: Sequence[keras.callbacks.Callback], strategy: Strategy, restores: bool = False
) -> list[keras.callbacks.Callback]:
    """The callbacks of this process: those that write files act on the chief.

    Args:
      callbacks: as given on every process.
      strategy: where the model trains.
      restores: whether what the chief restores reaches the other processes.

    Raises:
      InputError: one of them does not work in a job of several processes.
    """
    backs_up = any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks)
    if strategy.cluster.size > 1 and backs_up and not restores:
        raise InputError(
            "Only one of several processes would restore its weights. Received: BackupAndRestore in a job of "
            f"{strategy.cluster.size} processes. Leave it out."
        )
    if strategy.global_view and strategy.cluster.size > 1:
        _refuse_reads_on_the_chief(callbacks)
    return [c for c in callbacks if strategy.is_chief or not isinstance(c, WRITE_FILES)]


def _refuse_reads_on_the_chief(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """To read a variable that lies on several processes takes all of them."""
    reading = [
        type(c).__name__
        for c in callbacks
        if isinstance(c, keras.callbacks.ModelCheckpoint) or getattr(c, "histogram_freq", None)
    ]
    if reading:
        raise InputError(
            "On a mesh of several processes the chief cannot read weights alone. Received: "
            f"{', '.join(reading)}. Call trainer.save on every process instead."
        )


def validation_logs(results: Mapping[str, float]) -> dict[str, float]:
    """An evaluation's results under the names that Keras's callbacks watch."""
    return {f"val_{name}": value for name, value in results.items()}
