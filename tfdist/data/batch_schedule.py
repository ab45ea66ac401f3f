"""A run's course through its data: the batch that it began with, what becomes of it on other replicas, and where it is."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.data import StreamPosition
from tfdist.errors import InputError

GLOBAL, REPLICA = "global", "replica"
ELASTIC_BATCHES = (GLOBAL, REPLICA)  # what stays when a run goes on with another number of replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """What a checkpoint keeps of a run's batches, so that 3, then 2, then 3 replicas are exactly where they began.

    Attributes:
      begun_at: the step at which the run began.
      epochs_from: the place in the stream from which its epochs are counted.
      batch_size: the global batch that it began with.
      replicas: in how many parts that was computed.
      position: now, with the global batch in use.
    """

    begun_at: int
    epochs_from: int
    batch_size: int
    replicas: int
    position: StreamPosition

    @classmethod
    def begun(cls, position: StreamPosition, step: int, size: int, batch_size: int, replicas: int) -> "BatchSchedule":
        """That of a run which begins at a step, on data of `size` examples, with a batch on so many replicas."""
        return cls(
            begun_at=step,
            epochs_from=position.epochs_from(step, size),
            batch_size=batch_size,
            replicas=replicas,
            position=position,
        )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "BatchSchedule | None":
        """That of a checkpoint with these values; None if it is older, of a run whose batch never changed."""
        saved = values.get("course")
        return cls(**{**saved, "position": StreamPosition(**saved["position"])}) if saved else None

    def to_json(self) -> dict[str, Any]:
        """All of it, as a checkpoint keeps it."""
        return dataclasses.asdict(self)

    @property
    def rate(self) -> float:
        """What the learning rate is multiplied by: as many times as the batch is that which the run began with.

        The linear scaling rule (Goyal et al. 2017, arXiv:1706.02677).
        """
        return self.position.batch_size / self.batch_size

    def __str__(self) -> str:
        """What is in use now, for a person."""
        return (
            f"A batch has {self.position.batch_size} examples: the run began with {self.batch_size} on {self.replicas} "
            f"replicas, and keeps the batch of one. The learning rate is multiplied by {self.rate:g}."
        )

    def on(self, replicas: int, step: int, batch_size: int, elastic_batch: str) -> "BatchSchedule":
        """The course from a step on.

        Args:
          replicas: in how many parts a batch is computed from there on.
          step: updates done.
          batch_size: as the flag: with "replica" the batch that the run began with, else that from there on.
          elastic_batch: "global": the global batch stays; "replica": the batch of one replica stays.

        Raises:
          InputError: it is neither; or the batch of one replica is to stay, and is no whole number or that of another run.
        """
        if elastic_batch not in ELASTIC_BATCHES:
            raise InputError(f"--elastic_batch must be global or replica. Received: {elastic_batch!r}.")
        if elastic_batch == REPLICA:
            return dataclasses.replace(self, position=self.position.then(step, self._each(batch_size) * replicas))
        position = self.position.then(step, batch_size)
        if batch_size == self.batch_size:
            return dataclasses.replace(self, position=position)
        return dataclasses.replace(self, batch_size=batch_size, replicas=replicas, position=position)

    def _each(self, batch_size: int) -> int:
        """The batch of one replica."""
        if batch_size != self.batch_size:
            raise InputError(
                "--elastic_batch=replica keeps the batch of one replica, as the run began. Received: "
                f"--batch_size={batch_size} in a run that began with {self.batch_size} on {self.replicas} replicas. Give the "
                "batch that it began with."
            )
        if batch_size % self.replicas:
            below = batch_size - batch_size % self.replicas
            near = " or ".join(str(size) for size in (below, below + self.replicas) if size)
            raise InputError(
                "--elastic_batch=replica needs a --batch_size that is divided by the number of replicas on which the run "
                f"begins. Received: --batch_size={batch_size} and {self.replicas} replicas. Use {near}, or "
                "--elastic_batch=global."
            )
        return batch_size // self.replicas

    def end(self, steps: int, epochs: int, size: int) -> int:
        """The step at which the run ends that has so many steps, or so many epochs of data of `size` examples.

        One of the two is 0. What an epoch lacks here is made up in steps of the batch in use.
        """
        return self.begun_at + steps if steps else self.position.steps_for(self.epochs_from + epochs * size)
