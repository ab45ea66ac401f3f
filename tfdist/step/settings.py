"""Options of a training step."""

import dataclasses
from collections.abc import Sequence

import keras

from tfdist.distribution.strategy import State
from tfdist.gradients import Clip, LossScale
from tfdist.grammar.sync import EveryStep, Sync


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
        found = self.loss_scale.state() if self.loss_scale else []
        return [dataclasses.replace(state, per_replica=self.sync.exchanges_weights) for state in found]
