"""What of a model depends on several rows, for examples as arrays."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.step.row_dependence import RowDependence, row_dependence


def dependence(
    model: keras.Model, *examples: Any, replicas: int = 1, micro_steps: int = 1, may_be_called: bool = True
) -> RowDependence:
    return row_dependence(
        model,
        keras.tree.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), examples),
        is_divided=replicas * micro_steps > 1,
        has_whole_model=may_be_called,
        may_communicate=micro_steps == 1,
    )


def names(losses: Sequence[str]) -> list[str]:
    """Returns the names of losses, without the reasons."""
    return [loss.partition(", ")[0] for loss in losses]
