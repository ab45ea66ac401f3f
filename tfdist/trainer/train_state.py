"""`TrainState`: what changes during a run, besides variables."""

from collections.abc import Mapping
from typing import Any

from tfdist.checkpoint.best import Best, BestValue, best_of
from tfdist.checkpoint.callback_state import CallbackStates
from tfdist.checkpoint.format import Checkpoint
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.data.stream_position import StreamPosition
from tfdist.step.running_metrics import Progress
from tfdist.trainer.replica_speeds import ReplicaSpeeds


class TrainState:
    """The step, the position in the data, running metrics and callbacks' state; a `FitLoop` owns it during a run.

    Attributes:
      step: number of updates done.
      progress: running metrics since the last record and in the current epoch.
      callbacks: state of the Keras callbacks.
      best: follows the metric whose best value is kept; None if the last run had none.
      best_before: the best value before the next run.
      speeds: measured speeds of the replicas, and how rows are allocated by them; None unless they are measured.
      resumed_from: path of the checkpoint from which it was restored; "" for none.
      read_before: number of examples that earlier runs of this process used, since a resume if there was one.
    """

    def __init__(self, is_chief: bool) -> None:
        """Initializes the state of step 0; `is_chief`: whether callbacks' state is saved from this process."""
        self.step = 0
        self.progress = Progress()
        self.callbacks = CallbackStates(is_chief)
        self.best: BestValue | None = None
        self.resumed_from = ""
        self.best_before: Best | None = None
        self.speeds: ReplicaSpeeds | None = None
        self._begun_at: int | None = None  # of an unfinished run
        self._batches: BatchSchedule | None = None  # of an unfinished run
        self._position: StreamPosition | None = None  # where the last run has ended
        self._size: int | None = None  # of its data
        self.read_before = 0

    def batch_schedule(self, size: int, batch_size: int, parts: int, elastic_batch: str) -> BatchSchedule:
        """Returns the schedule with which training continues; changes nothing.

        Args:
          size: number of examples per epoch.
          batch_size: global batch size.
          parts: number of parts into which a batch is split.
          elastic_batch: see `Schedule`.
        """
        begun_at = self.step if self._begun_at is None else self._begun_at
        position = self._position or StreamPosition(batch_size)
        if self._size not in (None, size):  # other data, which begins with an epoch of its own
            epochs = -(-position.before(begun_at) // size)
            position = StreamPosition(batch_size, begun_at, epochs * size)
        begun = self._batches or BatchSchedule.begun(position, begun_at, size, batch_size, parts)
        return begun.on(parts, self.step, batch_size, elastic_batch)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Takes over the values of a checkpoint, whose variables have been restored."""
        self.resumed_from = str(checkpoint.path)
        self.step, self._batches = checkpoint.step, BatchSchedule.of(checkpoint.values["batch_schedule"])
        self._begun_at, self._position, self._size = self._batches.begun_at, None, None
        self.read_before = 0
        self.progress = Progress(checkpoint.values["progress"])
        self.best_before = best_of(checkpoint.values)
        self.speeds = ReplicaSpeeds.of(checkpoint.values["speeds"]) if "speeds" in checkpoint.values else None

    def values(self, batches: BatchSchedule) -> Mapping[str, Any]:
        """Returns the state as JSON, for a checkpoint; `batches` is the schedule of the run in progress."""
        best = {"best": list(self.best.best)} if self.best and self.best.best else {}
        speeds = {"speeds": self.speeds.to_json()} if self.speeds else {}
        progress = self.progress.to_json()
        return {"batch_schedule": batches.to_json(), "progress": progress, **best, **speeds}

    def end_run(self, batches: BatchSchedule, size: int) -> None:
        """Records that a run has ended, or failed: the next one continues at its position in data of the same size."""
        self.progress, self._begun_at = self.progress.next_run(), None
        self.best_before = self.best.best if self.best else None
        self._batches, self._position, self._size = None, batches.position, size
        self.read_before = batches.position.before(self.step)
