"""Placement of a model's variables: on all replicas from the first call that needs them, equal on all processes."""

import logging
import weakref
from collections.abc import Sequence

import keras
import numpy as np

from tfdist.coordination.timeouts import long_timeout
from tfdist.data.batches import checksum
from tfdist.distribution.strategy import Strategy
from tfdist.distribution.variable_creation import without_numbers
from tfdist.grammar.unique_names import unique_names
from tfdist.step.validation import inner_optimizer

_log = logging.getLogger(__name__)


class Placement:
    """Keeps track of the variables of a model, its metrics and its optimizers that have been placed on replicas."""

    def __init__(self, strategy: Strategy):
        """Starts without variables.

        Args:
          strategy: strategy on which variables are placed.
        """
        self._strategy = strategy
        self._placed: dict[int, weakref.ref[keras.Variable]] = {}

    def place(self, variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer] = ()) -> None:
        """Places variables as the strategy requires; all peers must have the same, whose values become equal."""
        everything = [*variables, *(variable for optimizer in optimizers for variable in optimizer.variables)]
        new = [variable for variable in everything if not self._has(variable)]
        new = list({id(variable): variable for variable in new}.values())
        if not new and not optimizers:
            return
        # Keras numbers names, and one process may have created more models than another.
        described = [(without_numbers(v.path), f"{v.dtype}{list(v.shape)}") for v in new]
        with long_timeout("its model") as deadline:
            self._strategy.peers.agree("variables", unique_names(described, mark=" #"), "variable ", deadline)
        self._strategy.adoption.adopt(new, with_inner(optimizers))
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
        placed = [variable for variable in variables if self._has(variable)]
        mine = [checksum([np.asarray(self._strategy.local(variable.value)[0])]) for variable in placed]
        with long_timeout("its weights") as deadline:
            everyone = self._strategy.peers.gather("weights", mine, deadline)
        if any(len(theirs) != len(mine) for theirs in everyone):
            return  # models differ: reported in `place`
        differs = next((i for i in range(len(mine)) if any(theirs[i] != mine[i] for theirs in everyone)), None)
        if differs is not None:
            _log.warning(
                "Weights differ between processes, first in %s: all processes use those of rank 0.",
                placed[differs].path,
            )
            self._strategy.adoption.send_from_first(placed)


def with_inner(optimizers: Sequence[keras.Optimizer]) -> list[keras.Optimizer]:
    """Returns the optimizers, including those wrapped by a `LossScaleOptimizer`."""
    return list({id(one): one for given in optimizers for one in (given, inner_optimizer(given))}.values())
