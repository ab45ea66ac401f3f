"""Creates a model's variables and places them on all replicas."""

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
from tfdist.distribution.tf_distribute import strip_counters
from tfdist.keras_fit.step_outputs import inspect_step
from tfdist.step.validation import inner_optimizer


def create_variables(model: keras.Model, spec: Any, trains: bool) -> None:
    """Creates every variable, as Keras does; for a model with a custom step, in the order in which the step uses them.

    `spec` is a structure of `tf.TensorSpec` of a batch, and `trains` indicates whether the model will be trained.
    """
    has_custom_step = keras_internals.is_overridden(model, "train_step")
    if has_custom_step and type(model).call is keras.Model.call:
        model.built = True  # the step calls layers rather than the model
    if has_custom_step and trains:
        # In the order and with the shapes of the step, which may differ from those of `call`.
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # raised again when the step is compiled
            inspect_step(model, model.train_step, spec, lambda *_: None)
    if not has_custom_step:
        keras_internals.build(model, spec)
        return
    # A custom step may create its own labels, and may create variables when it is traced.
    with contextlib.suppress(ValueError, NotImplementedError), keras_internals.patched((model, "optimizer", None)):
        keras_internals.build(model, spec)


_log = logging.getLogger(__name__)


class Placement:
    """Places the variables of a model, its metrics and its optimizers on replicas, and keeps track of them."""

    def __init__(self, strategy: Strategy):
        self._strategy, self._is_replicated = strategy, strategy.optimizer_shards.is_on_all_replicas
        self._placed_variables: dict[int, weakref.ref[keras.Variable]] = {}

    def place(self, variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer] = ()) -> None:
        """Places variables as the strategy requires and makes their values equal; all peers must have the same variables."""
        candidates = [*variables, *(variable for optimizer in optimizers for variable in optimizer.variables)]
        replicated = {id(variable): variable for variable in filter(self._is_replicated, candidates)}
        new_variables = [variable for variable in replicated.values() if not self._is_placed(variable)]
        if not new_variables and not optimizers:
            return
        # Keras appends counters to names, and processes may have created different numbers of models.
        descriptions = [(strip_counters(v.path), f"{v.dtype}{list(v.shape)}") for v in new_variables]
        with long_timeout("its model") as deadline:
            self._strategy.peers.agree("variables", unique_names(descriptions, mark=" #"), "variable ", deadline)
        all_optimizers = {id(o): o for optimizer in optimizers for o in (optimizer, inner_optimizer(optimizer))}
        self._strategy.adoption.adopt(new_variables, list(all_optimizers.values()))
        self._strategy.synchronize(new_variables)
        self._placed_variables |= {id(variable): weakref.ref(variable) for variable in new_variables}

    def _is_placed(self, variable: keras.Variable) -> bool:
        reference = self._placed_variables.get(id(variable))
        return reference is not None and reference() is variable

    def equalize(self, model: keras.Model) -> None:
        """Assigns rank 0's values to trainable variables and the optimizer's variables if values differ between processes.

        A process may have loaded or assigned weights, or trained them in a custom loop.
        """
        if self._strategy.cluster.size == 1 or self._strategy.blocks.spans_processes:
            return  # a single process, or variables that span processes
        optimizer = model.optimizer if model.compiled else None
        variables = [*model.trainable_variables, *(optimizer.variables if optimizer is not None else [])]
        placed_variables = [v for v in filter(self._is_replicated, variables) if self._is_placed(v)]
        checksums = [checksum([np.asarray(self._strategy.local(variable.value)[0])]) for variable in placed_variables]
        with long_timeout("its weights") as deadline:
            all_checksums = self._strategy.peers.gather("weights", checksums, deadline)
        if any(len(peer_checksums) != len(checksums) for peer_checksums in all_checksums):
            return  # `place` reports that the models differ
        pairs = zip(placed_variables, zip(*all_checksums, strict=True), strict=True)
        if path := next((variable.path for variable, values in pairs if len(set(values)) > 1), ""):
            _log.warning("Weights differ between processes, first in %s. All processes use those of rank 0.", path)
            self._strategy.adoption.broadcast_values(placed_variables)
