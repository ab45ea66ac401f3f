"""The `WeightSynchronizer` interface for exchanges between replicas outside of steps."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist.data import Pipeline
from tfdist.distribution.strategy import Strategy
from tfdist.step.compiled_loop import Loop, MakeLoop, compile_loop
from tfdist.step.compiled_steps import Steps


class WeightSynchronizer:
    """Exchanges weights at certain steps. This base class exchanges nothing: its steps sum gradients.

    Every process makes the same calls at the same steps.

    Attributes:
      variables: variables of the exchanges that are equal on all replicas, to be saved with the run.
      own_variables: variables that differ between replicas, also to be saved.
      has_local_weights: whether the weights of replicas differ at some steps.
      remedy_for_slow_rank: advice to users if a rank is slow; empty if other ranks do not wait for it in each step.
    """

    variables: Sequence[keras.Variable] = ()
    own_variables: Sequence[keras.Variable] = ()
    has_local_weights: bool = False
    remedy_for_slow_rank: str = "--balance=measured allocates it fewer rows."

    def is_local_step(self, step: int) -> bool:
        """Returns whether each replica updates its own weights in this step."""
        return False

    def loop(
        self, steps: Steps, batch_size: int | None, rate_factor: float, step: int, make: MakeLoop = compile_loop
    ) -> Loop:
        """Returns the compiled loop for the steps starting at `step`.

        Args:
          steps: steps of the trainer.
          batch_size: number of examples of a step; None if it varies from batch to batch.
          rate_factor: factor of the learning rate.
          step: the next step.
          make: creates the loop, unless the synchronizer has its own loop.
        """
        return steps.loop(batch_size, make, rate_factor=rate_factor, is_local=self.is_local_step(step))

    def batches(self, pipeline: Pipeline, strategy: Strategy) -> Iterator[Any]:
        """Returns the iterator of the batches of this process's replicas, for `loop`."""
        return strategy.distribute(lambda *_: pipeline.indexed_dataset(*strategy.training_shares))

    def next_step(self, step: int) -> int | None:
        """Returns the next step after `step` at which `run_exchanges` must be called, or None."""
        return None

    def begin(self, step: int, batch_size: int) -> None:
        """Prepares for training that starts after `step` updates, with global batches of this size."""

    def run_exchanges(self, step: int) -> Mapping[str, float]:
        """Runs the exchanges that are due after `step` updates; returns fields for training records."""
        return {}

    def take_fields(self) -> Mapping[str, Any]:
        """Returns fields of a training record about the time since the last record."""
        return {}

    def wait_for_exchange(self) -> None:
        """Waits for the exchange in the background, if any. Then variables may be read and collectives called."""

    def training(self) -> contextlib.AbstractContextManager[None]:
        """Context of a run of steps. On exit, no exchange is running, except after an error."""
        return contextlib.nullcontext()

    def with_global_weights(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Context in which all replicas have the global weights, for evaluation; local weights are restored on exit."""
        return contextlib.nullcontext()

    @property
    def payload_per_step(self) -> float:
        """Average bytes that a replica sends per step; 0 before the first exchange, or if steps count the bytes."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """Returns the state, except variables, as JSON for a checkpoint."""
        return {}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """Restores a result of `to_json`, or {} for an unknown run. Call it after the variables are restored."""
