"""The batch schedule of a run: its initial and current batch size, and its position in the stream of examples."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.data import StreamPosition
from tfdist.errors import InputError

# Which batch size stays constant when a run resumes with a different number of replicas.
GLOBAL, REPLICA = "global", "replica"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The batch schedule of a run, as saved in checkpoints.

    A run that resumes with 2 replicas instead of 3, and then with 3 again, returns to its original batch size.
    """

    begun_at: int  # step at which the run began
    epochs_from: int  # position in the stream from which the run's epochs are counted
    batch_size: int  # initial global batch size
    replicas: int  # number of parts into which the initial batch was split
    position: StreamPosition  # position in the stream, with the current global batch size

    @classmethod
    def initial(cls, position: StreamPosition, step: int, size: int, batch_size: int, replicas: int) -> "BatchSchedule":
        """Returns the schedule of a run that begins at `step`, on a dataset of `size` examples."""
        start = position.epochs_from(step, size)
        return cls(begun_at=step, epochs_from=start, batch_size=batch_size, replicas=replicas, position=position)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "BatchSchedule":
        """Creates a schedule from the result of `to_json`."""
        return cls(**{**values, "position": StreamPosition(**values["position"])})

    def to_json(self) -> dict[str, Any]:
        """Returns all attributes as JSON, for a checkpoint."""
        return dataclasses.asdict(self)

    @property
    def learning_rate_factor(self) -> float:
        """The current batch size divided by the initial one.

        This is the linear scaling rule (Goyal et al. 2017, arXiv:1706.02677).
        """
        return self.position.batch_size / self.batch_size

    def __str__(self) -> str:
        """Describes the current batch size, for logs."""
        return (
            f"A batch has {self.position.batch_size} examples: the run began with {self.batch_size} on {self.replicas} "
            f"replicas, and keeps the batch size per replica. The learning rate is multiplied by {self.learning_rate_factor:g}."
        )

    def from_step(self, replicas: int, step: int, batch_size: int, elastic_batch: str) -> "BatchSchedule":
        """Returns the schedule from a step on.

        Args:
          replicas: number of parts into which each further batch is split.
          step: number of completed updates.
          batch_size: value of --batch_size: the run's initial batch size if `elastic_batch` is "replica", otherwise the
            batch size from `step` on.
          elastic_batch: "global" keeps the global batch size, "replica" the batch size per replica.

        Raises:
          InputError: `elastic_batch` is unknown; or it is "replica", and the initial batch size differs or is not
            divisible by the initial number of replicas.
        """
        if elastic_batch not in (GLOBAL, REPLICA):
            raise InputError(f"--elastic_batch must be global or replica. Received: {elastic_batch!r}.")
        size = batch_size if elastic_batch == GLOBAL else self._batch_size_per_replica(batch_size) * replicas
        position = self.position.with_batch_size(step, size)
        if batch_size == self.batch_size:
            return dataclasses.replace(self, position=position)
        return dataclasses.replace(self, batch_size=batch_size, replicas=replicas, position=position)

    def _batch_size_per_replica(self, batch_size: int) -> int:
        if batch_size != self.batch_size:
            raise InputError(
                "--elastic_batch=replica keeps the batch size per replica with which the run began. Received: "
                f"--batch_size={batch_size} in a run that began with {self.batch_size} on {self.replicas} replicas. "
                "Pass the initial batch size."
            )
        if batch_size % self.replicas:
            lower = batch_size - batch_size % self.replicas
            alternatives = " or ".join(str(size) for size in (lower, lower + self.replicas) if size)
            raise InputError(
                "--elastic_batch=replica needs a --batch_size that is divisible by the number of replicas on which the "
                f"run begins. Received: --batch_size={batch_size} and {self.replicas} replicas. Use {alternatives}, or "
                "--elastic_batch=global."
            )
        return batch_size // self.replicas

    def end(self, steps: int, epochs: int, size: int) -> int:
        """Returns the step at which a run of `steps` steps, or of `epochs` epochs of `size` examples, ends.

        One of `steps` and `epochs` is 0. An incomplete epoch is completed in steps of the current batch size.
        """
        return self.begun_at + steps if steps else self.position.steps_for(self.epochs_from + epochs * size)
