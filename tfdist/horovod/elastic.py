"""Elastic jobs: Horovod's states and callbacks, for Keras 3.

Requires Horovod and, to change the number of ranks, horovodrun's elastic options. With other launchers, the job has a fixed
size: `run` synchronizes the state and calls the function, `commit` saves the state in memory, and after an error, Horovod is
restarted from the last saved state.
"""

import functools
import logging
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import InputError, error_summary
from tfdist.horovod import tape
from tfdist.horovod.engine import horovod_required_error
from tfdist.horovod.errors import GraphModeError, check_eager, check_no_session
from tfdist.horovod.object_exchange import broadcast_object, broadcast_object_fn, broadcast_variables
from tfdist.horovod.process import init, rank, shutdown
from tfdist.horovod.wrapped_optimizer import Distributed, shared_variables

try:
    from horovod.common import elastic as horovod_elastic
    from horovod.common.elastic import ObjectState as _ObjectState
    from horovod.common.elastic import State
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

    run_fn = horovod_elastic.run_fn
except ImportError:
    horovod_elastic = None

    class State(RuntimeError):  # type: ignore[no-redef]
        """Placeholder for Horovod's elastic state, errors and function, which need Horovod."""

        def __init__(self, *args: Any, **kwargs: Any):
            raise horovod_required_error("hvd.elastic", "Save checkpoints with Keras's ModelCheckpoint")

    _ObjectState = HorovodInternalError = HostsUpdatedInterrupt = run_fn = State

_log = logging.getLogger(__name__)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that resumes from its state when ranks are lost or join.

    Args:
      func: a function of a `State` and further arguments, without collective calls before the state is synchronized.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except tf.errors.UnknownError as error:  # TensorFlow's error for failures of Horovod
            if "Horovod" not in str(error):
                raise
            _log.warning("Horovod failed: %s", error_summary(error))
            raise HorovodInternalError(str(error)) from error

    if horovod_elastic and os.environ.get("HOROVOD_ELASTIC") != "1":
        # The launcher sends no notifications. The service for them listens on every network interface, unpickles received
        # data, and stores its key where anyone can read it.
        horovod_elastic.notification_manager = types.SimpleNamespace(
            **dict.fromkeys(("init", "register_listener", "remove_listener"), lambda *listener: None)
        )
    return run_fn(wrapper, _reset)


def _reset() -> None:
    shutdown()
    init()


class ObjectState(_ObjectState):
    """A state of values, which are passed as keywords, stored as attributes, and synchronized as pickled objects.

    `bcast_object` and `get_rank` default to this package's functions.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any):
        super().__init__(bcast_object=bcast_object or broadcast_object, get_rank=get_rank or rank, **kwargs)


class _VariablesState(ObjectState):
    """A state of variables and values. Synchronization resets the tapes' compression state, which previous ranks left."""

    def __init__(self, variables: Callable[[], Sequence[Any]], **kwargs: Any):
        self._variables, self._saved_values = variables, [tf.identity(v) for v in variables()]
        super().__init__(**kwargs)

    def save(self) -> None:
        """Saves the current variables and values in memory."""
        self._saved_values = [tf.identity(variable) for variable in self._variables()]
        super().save()

    def restore(self) -> None:
        """Restores the last saved variables and values; newer variables are not changed."""
        for variable, value in zip(self._variables(), self._saved_values, strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Sets the variables and values to rank 0's, and saves them."""
        broadcast_variables(self._variables(), 0)
        tape.reset_state()
        self._saved_values = [tf.identity(variable) for variable in self._variables()]
        super().sync()


class TensorFlowState(_VariablesState):
    """A state of TensorFlow variables, and of values that are passed as keywords; `session` must be None."""

    def __init__(self, variables: Sequence[Any] | None = None, session: None = None, **kwargs: Any):
        check_no_session(session)
        if variables is None:
            raise GraphModeError(
                "TensorFlow 2 has no global variables. Received: TensorFlowState() without variables. Pass a list of variables."
            )
        check_eager("hvd.elastic.TensorFlowState", "Create it outside of graphs")
        self.variables = variables
        super().__init__(lambda: variables, **kwargs)


class TensorFlowKerasState(_VariablesState):
    """A state of a model, its optimizer, and values such as `batch` and `epoch`, without the states of random layers.

    Synchronization resets the state of the optimizer's compression, and discards accumulated, unapplied gradients.

    Args:
      model: a built model.
      optimizer: the optimizer, which is built if necessary; defaults to the compiled model's.
      backend: accepted, but has no effect.
      **kwargs: the values.
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.Optimizer | None = None, backend: Any = None, **kwargs: Any
    ):
        check_eager("hvd.elastic.TensorFlowKerasState", "Create it outside of graphs")
        if not model.built:
            raise InputError("The model must be built first. Received: a model without variables. Add an Input to it.")
        self.model, self.optimizer = model, optimizer or model.optimizer
        super().__init__(lambda: shared_variables(self.model, self.optimizer), **kwargs)

    def reset(self) -> None:
        """Makes Keras trace the model's steps again, because the number of ranks may have changed."""
        self.model.train_function = self.model.test_function = self.model.predict_function = None
        super().reset()

    def sync(self) -> None:
        for optimizer in (self.optimizer, getattr(self.optimizer, "inner_optimizer", None)):
            if isinstance(optimizer, Distributed):
                optimizer.reset_state()
        super().sync()


class KerasState(TensorFlowKerasState):
    """`TensorFlowKerasState`, under Horovod's name for Keras."""

    def __init__(self, model: keras.Model, optimizer: keras.Optimizer | None = None, **kwargs: Any):
        super().__init__(model, optimizer, **kwargs)


class _StateCallback(keras.callbacks.Callback):
    def __init__(self, state: Any):
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits a state every `batches_per_commit` batches, and at the end of an epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1):
        super().__init__(state)
        self.batches_per_commit = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Restarts the count of batches, on all ranks at the same time."""
        self._batches_left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches_left -= 1
        if self._batches_left == 0:
            self._batches_left = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Sets `state.batch` to the index of the batch, and to 0 after an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Sets `state.epoch` to the number of completed epochs, including those before resets."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Records the first epoch, because Keras counts from 0 after each reset."""
        self._first_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._first_epoch + epoch + 1
