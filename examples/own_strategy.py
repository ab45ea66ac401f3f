"""A custom strategy: `mirrored`, with a report of what each replica sends.

    PYTHONPATH=examples tfdist train --strategy=own_strategy:Measured --devices=2 --steps=50

A strategy subclasses `tfdist.Strategy` or an existing strategy, as here. Its constructor takes `cluster` (the processes of the
job, and which of them this is), `join` (creates the control plane), and its own options as keywords.
"""

import sys

import tensorflow as tf
from tfdist.strategies.mirrored import Mirrored

from tfdist.collectives import RecordingCollectives


class Measured(Mirrored):
    """Mirrored, with collectives that record their calls."""

    def __init__(self, *, cluster, join, devices: int = 2):
        """Args: devices: number of replicas."""
        super().__init__(cluster=cluster, join=join, devices=devices)
        self.name = "measured"
        self.collectives = RecordingCollectives(self.collectives)

    def close(self) -> None:
        """Prints each message of the compiled functions; each name is one message of a step."""
        # A function is traced once per replica of this process, so each of its messages was recorded once per replica.
        calls = {(call.operation, call.name): call for call in self.collectives.calls}
        for (operation, name), call in sorted(calls.items()):
            dtypes = ", ".join(sorted({tf.as_dtype(dtype).name for dtype in call.dtypes}))
            print(f"{operation} {name}: {call.payload_bytes:,} bytes of {dtypes}", file=sys.stderr)
        super().close()
