"""Options of a training step, stable names of the tensors that replicas reduce, and the bytes that a step sends."""

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
    """Options of a step.

    Attributes:
      batch_size: rows of a global batch; None if they vary, in which case each batch is a `ReplicaRows`, which contains its
        size.
      seed: seed of random layers.
      jit_compile: whether to compile the forward and backward pass with XLA.
      micro_steps: number of consecutive parts in which a replica computes its rows.
      clip: applied to the reduced gradients.
      loss_scale: for float16; None for no scaling, in which case a step that is not finite ends the run.
      max_skipped_steps: with loss scaling, number of consecutive skipped steps that ends the run.
      sparse: names, as of `named_specs`, of the gradients that the reducer accepts as rows.
      sync: how replicas are synchronized.
      averaged: statistics that the forward pass assigns from a replica's rows, and with which a later step computes: they
        are averaged over replicas after each step. Others are averaged before they are used or saved.
    """

    batch_size: int | None
    seed: int = 0
    jit_compile: bool = False
    micro_steps: int = 1
    clip: Clip = Clip()
    loss_scale: LossScale | None = None
    max_skipped_steps: int = 50
    sparse: frozenset[str] = frozenset()
    sync: Sync = EveryStep()
    averaged: Sequence[keras.Variable] = dataclasses.field(default=(), compare=False)

    def scale_state(self) -> list[State]:
        """Returns the state of the loss scale; empty without loss scaling."""
        states = self.loss_scale.state() if self.loss_scale else []
        return [dataclasses.replace(state, per_replica=self.sync.exchanges_weights) for state in states]


def named_specs(variables: Sequence[keras.Variable], *scalars: str) -> list[tf.TensorSpec]:
    """Returns names, shapes and dtypes of the reduced tensors: one per variable, and scalars of dtype floatx.

    The name of a tensor is the path of its variable. Keras allows several variables to have one path, as in a model that
    contains two models with a layer of the same name: all but the first get a number, as in checkpoints.

    Args:
      variables: variables of a model.
      *scalars: names of the scalars.
    """
    tensors = [(v.path, (v.shape, v.dtype)) for v in variables]
    named = unique_names([*tensors, *((name, ((), keras.config.floatx())) for name in scalars)])
    return [tf.TensorSpec(shape, dtype, name) for name, (shape, dtype) in named.items()]


def sent_as_rows(model: keras.Model) -> frozenset[str]:
    """Returns the names of the gradients of large embedding tables, of which only the used rows may be sent."""
    tables = {id(variable) for variable in keras_internals.embeddings(model)}
    named = zip(named_specs(model.trainable_variables), model.trainable_variables, strict=True)
    return frozenset(
        spec.name for spec, variable in named if id(variable) in tables and tensor_bytes(spec) >= SPARSE_MIN_BYTES
    )


def cost_of(summed_bytes: float, exact_bytes: int, message_bytes: int = 0) -> dict[str, float]:
    """Returns the bytes that a step sends, as fields of a record; empty if they are unknown or zero.

    Args:
      summed_bytes: bytes that a replica sends per step for the sum of gradients.
      exact_bytes: size of all gradients without compression.
      message_bytes: bytes that the process sends besides, to other stages of a pipeline.
    """
    payload = summed_bytes + message_bytes
    return {
        **({"payload_bytes": payload} if payload else {}),
        **({"message_bytes": message_bytes} if message_bytes else {}),
        **({"compression_ratio": exact_bytes / summed_bytes} if summed_bytes else {}),
    }
