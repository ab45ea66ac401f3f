"""The configuration of a user's program that calls Keras's `fit`."""

import dataclasses

from tfdist.config.conflicts import flag_text
from tfdist.config.fields import (
    flag_field,
)
from tfdist.config.job_config import CHECKS, DEVICES, JobConfig
from tfdist.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """Configuration of a user's program that calls Keras's `fit`, `evaluate` and `predict`."""

    strategy: str = flag_field(
        "auto", DEVICES, "Distribution strategy: auto, single, mirrored, multiworker, horovod, or package.module:Class."
    )
    devices: int = flag_field(
        0, DEVICES, "Number of devices per process, for mirrored. 0 uses all GPUs, or one CPU device.", is_option=True
    )
    stall_shutdown_seconds: float = flag_field(
        600.0,
        CHECKS,
        "Seconds a process waits for the others at a call of fit, evaluate or predict, and at the end of the program.",
        least=1,
    )
    check_first_batch: bool = flag_field(
        True,
        CHECKS,
        "Compare custom losses, metrics and train steps on replicas with one device, on the first batch. If neither "
        "the mean nor the sum over replicas is equal, every replica computes whole batches.",
    )

    def _complete(self) -> None:
        """See base class."""
        if self.strategy in ("mesh", "tpu"):
            raise InputError(
                "Keras's own fit runs on single, mirrored, multiworker and horovod. Received: "
                f"{flag_text('strategy', self.strategy)}. Use one of these, or tfdist.Trainer."
            )
