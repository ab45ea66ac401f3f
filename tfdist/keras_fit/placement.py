"""Creation and placement of a model's variables: on all replicas from the first call that needs them."""

import contextlib
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdist import keras_internals
from tfdist.config.spec import unique_names
from tfdist.coordination.group import long_timeout
from tfdist.data.batches import checksum
from tfdist.distribution.strategy import Strategy
from tfdist.distribution.tf_distribute import without_numbers
from tfdist.keras_fit.step_outputs import inspect_step
from tfdist.step.validation import inner_optimizer


def create_variables(model: keras.Model, spec: Any, trains: bool) -> None:
    """Creates every variable, as Keras does; for a model with a custom step, in the order in which the step needs them.

    Args:
      model: compiled model.
      spec: structure of `tf.TensorSpec` of a batch.
      trains: whether the model is about to be trained.
    """
    own = keras_internals.is_overridden(model, "train_step")
    if own and type(model).call is keras.Model.call:
        model.built = True  # the step calls layers, and nothing calls the model
    if own and trains:
        # In the order, and with the shapes, of its step; those of its `call` may differ.
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # raised again when the step is created
            inspect_step(model, model.train_step, spec, lambda *_: None)
    try:
        with keras_internals.without_optimizer(model) if own else contextlib.nullcontext():
            keras_internals.build(model, spec)
    except (ValueError, NotImplementedError):
        # A custom step may create its labels, and its variables when it is traced.
        if not own:
            raise


_log = logging.getLogger(__name__)


class Placement:
    """Keeps track of the variables of a model, its metrics and its optimizers that have been placed on replicas."""

    def __init__(self, strategy: Strategy):
        """Starts without variables.

        Args:
          strategy: strategy on which variables are placed.
        """
        self._strategy, self._is_of_all = strategy, strategy.optimizer_shards.is_of_all
        self._placed: dict[int, weakref.ref[keras.Variable]] = {}

    def place(self, variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer] = ()) -> None:
        """Places variables as the strategy requires; all peers must have the same, whose values become equal."""
        candidates = [*variables, *(variable for optimizer in optimizers for variable in optimizer.variables)]
        new = [variable for variable in filter(self._is_of_all, candidates) if not self._has(variable)]
        new = list({id(variable): variable for variable in new}.values())
        if not new and not optimizers:
            return
        # Keras numbers names, and one process may have created more models than another.
        descriptions = [(without_numbers(v.path), f"{v.dtype}{list(v.shape)}") for v in new]
        with long_timeout("its model") as deadline:
            self._strategy.peers.agree("variables", unique_names(descriptions, mark=" #"), "variable ", deadline)
        self._strategy.adoption.adopt(new, include_inner(optimizers))
        self._strategy.synchronize(new)
        self._placed |= {id(variable): weakref.ref(variable) for variable in new}

    def _has(self, variable: keras.Variable) -> bool:
        placed = self._placed.get(id(variable))
        return placed is not None and placed() is variable

    def equalize(self, model: keras.Model) -> None:
        """Sets trainable variables and the optimizer's to rank 0's values if those of any process differ.

        A process may have loaded or assigned weights, or trained them in a custom loop.
        """
        if self._strategy.cluster.size == 1 or self._strategy.blocks.spans_processes:
            return  # one process, or each has other parts of the same variables
        optimizer = model.optimizer if model.compiled else None
        variables = [*model.trainable_variables, *(optimizer.variables if optimizer is not None else [])]
        placed = [variable for variable in filter(self._is_of_all, variables) if self._has(variable)]
        checksums = [checksum([np.asarray(self._strategy.local(variable.value)[0])]) for variable in placed]
        with long_timeout("its weights") as deadline:
            all_checksums = self._strategy.peers.gather("weights", checksums, deadline)
        if any(len(others) != len(checksums) for others in all_checksums):
            return  # models differ: reported in `place`
        differs = next(
            (i for i in range(len(checksums)) if any(others[i] != checksums[i] for others in all_checksums)), None
        )
        if differs is not None:
            _log.warning(
                "Weights differ between processes, first in %s: all processes use those of rank 0.",
                placed[differs].path,
            )
            self._strategy.adoption.send_from_first(placed)


def include_inner(optimizers: Sequence[keras.Optimizer]) -> list[keras.Optimizer]:
    """Returns the optimizers, including those wrapped by a `LossScaleOptimizer`."""
    return list({id(one): one for optimizer in optimizers for one in (optimizer, inner_optimizer(optimizer))}.values())
