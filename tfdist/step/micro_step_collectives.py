"""Collectives between the micro-steps of a step, where nothing may communicate."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Recording
from tfdist.errors import InputError


class MicroStepCollectives(Recording):
    """Rejects communication between micro-steps, whose number may differ between replicas."""

    def _on_call(self, operation: str, tensors: Sequence[tf.Tensor], name: str) -> None:
        """See base class."""
        raise InputError(
            "A layer or loss that communicates takes the whole batch at once. Received: accumulate_steps > 1 and a "
            f"call of {operation} ({name}). Leave out accumulate_steps."
        )
