"""The interface `WeightSynchronizer` of exchanges between replicas outside of steps. The base class exchanges nothing."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist.data import Pipeline
from tfdist.distribution.strategy import Strategy
from tfdist.step.compiled_loop import Loop, MakeLoop, compile_loop
from tfdist.step.compiled_steps import Steps


class WeightSynchronizer:
    """Exchanges weights at certain steps; this base class is for steps that sum gradients themselves.

    Every process makes the same calls at the same steps.

    Attributes:
      variables: variables of the exchanges that are equal on all replicas, to be saved with the run.
      own_variables: variables of which each replica has its own value, to be saved, too.
      has_local_weights: whether replicas have weights of their own at some steps.
    """

    variables: Sequence[keras.Variable] = ()
    own_variables: Sequence[keras.Variable] = ()
    has_local_weights: bool = False

    def is_local_step(self, step: int) -> bool:
        """Returns whether, in this step, each replica updates weights of its own."""
        return False

    def loop(self, steps: Steps, batch_size: int | None, rate: float, step: int, make: MakeLoop = compile_loop) -> Loop:
        """Returns the compiled loop for the steps from `step` on.

        Args:
          steps: steps of the trainer.
          batch_size: examples that count as one step; None if each batch has a number of its own.
          rate: factor of the learning rate.
          step: the next step.
          make: creates the loop if this synchronizer has none of its own.
        """
        return steps.loop(batch_size, make, rate=rate, local=self.is_local_step(step))

    def batches(self, pipeline: Pipeline, strategy: Strategy) -> Iterator[Any]:
        """Returns the iterator of the batches of this process's replicas, for `loop`."""
        return strategy.distribute(lambda *_: pipeline.numbered(*strategy.training_shares))

    def next(self, step: int) -> int | None:
        """Returns the next step after `step` at which `at` must be called; None if there is none."""
        return None

    def begin(self, step: int, batch_size: int) -> None:
        """Prepares for training from this step on.

        Args:
          step: number of updates done.
          batch_size: size of global batches.
        """

    def at(self, step: int) -> Mapping[str, float]:
        """Runs the exchanges that are due after `step` updates; returns fields for training records."""
        return {}

    def settle(self) -> None:
        """Waits for an exchange that runs during the steps, so that variables may be read and collectives called."""

    def training(self) -> contextlib.AbstractContextManager[None]:
        """Context of a run of steps; no exchange is running afterwards, unless an error has left the context."""
        return contextlib.nullcontext()

    def averaged(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Context in which all replicas have the global weights, for evaluation; their own are restored on exit."""
        return contextlib.nullcontext()

    @property
    def payload_per_step(self) -> float:
        """Bytes that a replica sends per step on average; 0 before the first exchange, and if steps count them."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """Returns the state besides variables as JSON, for a checkpoint."""
        return {}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """Restores the result of `to_json`, after the variables; empty for an unknown run."""
