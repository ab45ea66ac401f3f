"""Options for replicas that differ in speed: how many rows each computes, and what is done about one that is late."""

import dataclasses

from tfdist.config.fields import balance_text, flag_field, straggler_text
from tfdist.config.topics import TRAINING


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnevenOptions:
    """What each replica computes of a batch."""

    balance: str = flag_field(
        "equal",
        TRAINING,
        "How rows are allocated to replicas: equal, measured (by speed) or weights(2,1,1). Affects time, not the result.",
        check=balance_text,
        training_only=True,
    )
    straggler: str = flag_field(
        "wait",
        TRAINING,
        "What to do about a late replica: wait; balance, the same as --balance=measured; drop(after=0.5), which skips the "
        "micro-steps that would begin later than 0.5 seconds into a step; or drop(after=auto), which measures the limit. drop "
        "needs --accumulate_steps, and its runs are not reproducible (docs/guides/uneven_devices.md).",
        check=straggler_text,
        known=("wait", "balance", "drop"),
        training_only=True,
        in_trials="wait",
    )
