"""Horovod's Keras callbacks, for Keras 3."""

import logging
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.horovod.gradient_sums import key_of
from tfdist.horovod.object_exchange import broadcast_variables
from tfdist.horovod.operations import allreduce
from tfdist.horovod.ops import Average, Min
from tfdist.horovod.process import rank, size
from tfdist.horovod.wrapped_optimizer import shared_variables

_log = logging.getLogger(__name__)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts one rank's model and optimizer variables when training begins.

    If the model is built (it has an `Input` or was called), the variables are broadcast before the first step. Otherwise, they
    are broadcast after the first batch, as in Horovod; the ranks then compute the first gradients from different weights. The
    states of random layers are not broadcast.

    Args:
      root_rank: rank whose variables are broadcast.
      device: accepted, but has no effect.
      local_variables: a variable, or several variables, to exclude.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None):
        super().__init__()
        self.root_rank = root_rank
        variables = local_variables if isinstance(local_variables, list | tuple | set) else [local_variables]
        self._local_keys = {key_of(variable) for variable in variables if variable is not None}
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable from the broadcast."""
        self._local_keys.add(key_of(var))

    def on_train_begin(self, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        if float(allreduce(tf.constant(float(self.model.built)), op=Min)):
            self._broadcast()
        else:
            _log.warning(
                "The model has no variables before its first batch, so each rank computes that batch's "
                "gradients with its own weights. To prevent this, add an Input to the model."
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        variables = shared_variables(self.model, self.model.optimizer)
        broadcast_variables([v for v in variables if key_of(v) not in self._local_keys], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the logs of an epoch over the ranks, in one all-reduce. Must precede callbacks that read the logs.

    `device` is accepted, but has no effect.
    """

    def __init__(self, device: str = ""):
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs:
            names = sorted(logs)
            values = [np.asarray(logs[name], "float64") for name in names]  # scalars and vector-valued metrics
            vector = tf.constant(np.concatenate([np.ravel(value) for value in values]))
            parts = np.split(allreduce(vector, op=Average).numpy(), np.cumsum([v.size for v in values])[:-1])
            for name, value, mean in zip(names, values, parts, strict=True):
                logs[name] = mean.reshape(value.shape) if value.ndim else float(mean[0])


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` from epoch `start_epoch` to epoch `end_epoch - 1`.

    Args:
      initial_lr: learning rate to multiply.
      multiplier: a function of the epoch, or the base of the power multiplier ^ (epoch - start_epoch).
      start_epoch: first epoch in which the rate is set.
      end_epoch: epoch after the last one in which the rate is set; None for no end.
      staircase: whether to set the rate once per epoch, instead of at every batch, with fractional epochs.
      momentum_correction: whether to scale the momentum variables of SGD and RMSprop with the rate (Goyal et al.,
        arXiv:1706.02677), which is equivalent to Horovod's change of the momentum for one batch.
      steps_per_epoch: number of steps per epoch; defaults to that of `fit`.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if initial_lr is None:
            raise InputError("The callback needs initial_lr. Received: None. Pass the optimizer's learning rate.")
        self.initial_lr, self.staircase, self.momentum_correction = initial_lr, staircase, momentum_correction
        self.start_epoch, self.end_epoch, self.steps_per_epoch = start_epoch, end_epoch, steps_per_epoch
        self.current_epoch = 0
        base: Any = multiplier
        self.multiplier = base if callable(base) else lambda epoch: float(base) ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise InputError(
                f"{type(self).__name__} must know the number of steps per epoch. Received: data of unknown length. "
                "Pass steps_per_epoch."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        end = math.inf if self.end_epoch is None else self.end_epoch
        if self.start_epoch <= self.current_epoch < end and not (self.staircase and batch):
            self._set_rate(self.current_epoch + (0 if self.staircase else batch / (self.steps_per_epoch or 1)))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old_rate = self._rate()
        try:
            optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)
        except TypeError as error:
            raise InputError(
                f"{type(self).__name__} sets the learning rate. Received: an optimizer with a schedule. Use a number."
            ) from error
        new_rate = self._rate()  # in the variable's precision
        if self.momentum_correction and old_rate and new_rate != old_rate and optimizer.built:
            for slot in keras_internals.velocities_of(getattr(optimizer, "inner_optimizer", optimizer)):
                slot.assign(slot * (new_rate / old_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size()` to `initial_lr` over the first epochs, batch by batch.

    rate = initial_lr / size * ((size - 1) * (epoch + 1 / steps_per_epoch) / warmup_epochs + 1)

    Args:
      initial_lr: rate at the end of the warmup.
      warmup_epochs: length of the warmup in epochs.
      momentum_correction: see `LearningRateScheduleCallback`.
      steps_per_epoch: number of steps per epoch; defaults to that of `fit`.
      verbose: whether rank 0 reports the end of the warmup.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / (self.steps_per_epoch or 1)  # for round numbers at the end of each epoch
            return (epoch * (size() - 1) / warmup_epochs + 1) / size()

        options: dict[str, Any] = {"momentum_correction": momentum_correction, "steps_per_epoch": steps_per_epoch}
        super().__init__(initial_lr, multiplier, end_epoch=warmup_epochs, staircase=False, **options)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's `ModelCheckpoint` of the best model; assign `filepath` before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ):
        path = "best.weights.h5" if save_weights_only else "best.keras"
        options = {"save_weights_only": save_weights_only, "mode": mode, "save_freq": save_freq}
        super().__init__(path, monitor, verbose, save_best_only=True, **options)
