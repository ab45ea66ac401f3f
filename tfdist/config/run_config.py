"""The configuration of a user's program that calls Keras's `fit`."""

import dataclasses

from tfdist.config.conflicts import flag_text
from tfdist.config.fields import (
    flag_field,
)
from tfdist.config.job_config import JobConfig
from tfdist.config.strategy_registry import AUTO, RUN_KERAS_FIT, declared, strategy_help, taking
from tfdist.config.topics import CHECKS, DEVICES
from tfdist.errors import InputError
from tfdist.grammar.all_reduce import parse_all_reduce

_ENGINES = f"{', '.join(RUN_KERAS_FIT[:-1])} and {RUN_KERAS_FIT[-1]}"
_WITH_DEVICES = tuple(name for name in taking("devices") if name in RUN_KERAS_FIT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """Configuration of a user's program that calls Keras's `fit`, `evaluate` and `predict`."""

    strategy: str = flag_field(AUTO, DEVICES, strategy_help(RUN_KERAS_FIT), known=(AUTO, *RUN_KERAS_FIT))
    devices: int = flag_field(
        0,
        DEVICES,
        f"Number of devices per process, for {' and '.join(_WITH_DEVICES)}. 0 uses all GPUs, or one CPU device.",
        is_option=True,
        elsewhere=(0, 1),
    )
    stall_shutdown_seconds: float = flag_field(
        600.0,
        CHECKS,
        "Seconds that a process waits for the others in a call of fit, evaluate or predict, and at the end of the "
        "program.",
        least=1,
    )
    rows: str = flag_field(
        "gather",
        CHECKS,
        "What to do with a loss, a metric or a step that needs all rows of a batch, and is neither a mean nor a sum over "
        "them. gather: replicas communicate what it needs of all rows. strict: refuse it.",
        choices=("gather", "strict"),
    )

    def _complete(self) -> None:
        """See base class."""
        if not declared(self.strategy).runs_keras_fit:
            raise InputError(
                f"A script with Keras's own fit runs on {_ENGINES}. Received: {flag_text('strategy', self.strategy)}. Use one "
                "of these, tfdist.Trainer or, for a mesh, tfdist.distribute."
            )
        if parse_all_reduce(self.all_reduce).is_measured:
            raise InputError(
                "--all_reduce=auto is measured by tfdist's own trainer only. Received: "
                f"{flag_text('all_reduce', self.all_reduce)}. Name an algorithm, give the table of another run as "
                "auto(table=FILE), or use `tfdist train`."
            )
