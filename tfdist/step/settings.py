"""Options of a training step, stable names of the reduced tensors, and the bytes that a step sends."""

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.interface import tensor_bytes
from tfdist.config.spec import unique_names
from tfdist.config.sync import EveryStep, Sync
from tfdist.distribution.strategy import State
from tfdist.gradients import Clip, LossScale
from tfdist.gradients.reducer import SPARSE_MIN_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a step."""

    # Number of rows of a global batch; None if it varies, in which case each batch is a `ReplicaRows` with its size
    batch_size: int | None
    seed: int = 0  # seed of random layers
    jit_compile: bool = False  # whether to compile the forward and backward pass with XLA
    micro_steps: int = 1  # number of parts into which a replica's rows are divided
    clip: Clip = Clip()  # clipping of the reduced gradients
    # For float16; None for no scaling, in which case a loss or gradient that is not finite ends the run
    loss_scale: LossScale | None = None
    max_skipped_steps: int = 50  # with loss scaling, number of consecutive skipped steps that ends the run
    sparse: frozenset[str] = frozenset()  # names of the gradients that the reducer accepts as rows; see `named_specs`
    sync: Sync = EveryStep()  # how replicas are synchronized
    # Statistics that the forward pass assigns from a replica's rows and that later steps use. They are averaged over
    # replicas after each step; other statistics are averaged before they are used or saved.
    averaged_statistics: Sequence[keras.Variable] = dataclasses.field(default=(), compare=False)

    def scale_state(self) -> list[State]:
        """Returns the state of the loss scale; empty without loss scaling."""
        states = self.loss_scale.state() if self.loss_scale else []
        return [dataclasses.replace(state, per_replica=self.sync.exchanges_weights) for state in states]


def named_specs(variables: Sequence[keras.Variable], *scalars: str) -> list[tf.TensorSpec]:
    """Returns names, shapes and dtypes of the reduced tensors: one per variable, and scalars of dtype floatx.

    The name of a tensor is the path of its variable. Keras allows several variables with the same path, as in a model that
    contains two models with a layer of the same name: a number is appended to all but the first, as in checkpoints.
    """
    tensors = [(v.path, (v.shape, v.dtype)) for v in variables]
    by_name = unique_names([*tensors, *((name, ((), keras.config.floatx())) for name in scalars)])
    return [tf.TensorSpec(shape, dtype, name) for name, (shape, dtype) in by_name.items()]


def sparse_gradient_names(model: keras.Model) -> frozenset[str]:
    """Returns the names of the gradients of large embedding tables, of which only rows with a gradient may be sent."""
    tables = {id(variable) for variable in keras_internals.embeddings(model)}
    specs_with_variables = zip(named_specs(model.trainable_variables), model.trainable_variables, strict=True)
    return frozenset(
        spec.name
        for spec, variable in specs_with_variables
        if id(variable) in tables and tensor_bytes(spec) >= SPARSE_MIN_BYTES
    )


def cost_of(summed_bytes: float, exact_bytes: int, message_bytes: int = 0) -> dict[str, float]:
    """Returns the bytes that a step sends, as fields of a record; empty if they are unknown or zero.

    A replica sends `summed_bytes` to sum gradients, whose size without compression is `exact_bytes`, and `message_bytes` to
    other pipeline stages.
    """
    ratio = exact_bytes / summed_bytes if summed_bytes else 0
    fields = {"payload_bytes": summed_bytes + message_bytes, "message_bytes": message_bytes, "compression_ratio": ratio}
    return {name: value for name, value in fields.items() if value}
