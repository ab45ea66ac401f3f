"""Patches of public Keras methods, for ranks that communicate inside Keras's steps."""

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.horovod.process import at_start, engine, horovod_is_installed, is_initialized
from tfdist.horovod.wrapped_optimizer import is_distributed, not_pickled


@functools.cache
def train_with_communication() -> None:
    """Patches `make_train_function`, `make_test_function`, `compile` and the loss scale of Keras, once.

    From `init` on, models train and are evaluated without XLA, which cannot compile communication: a custom step may
    communicate anywhere. A loss scale around a distributed optimizer checks this rank's gradients: the ranks that
    reduce first agree, so that all apply or all skip a step; it cannot be pickled, as it would be restored around a
    plain optimizer. `compile` accepts and ignores `experimental_run_tf_function`, which Horovod's scripts for
    TensorFlow 2 pass.
    """
    make, make_test = keras.Model.make_train_function, keras.Model.make_test_function
    scale = keras.optimizers.LossScaleOptimizer
    check, reduce = scale.check_finite, scale.__reduce__
    # Keras tests for each class whether its compile is that of this class.
    trainer: Any = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    compile_model = trainer.compile

    @functools.wraps(make)
    def make_train_function(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if is_initialized() or needs_communication(self):
            self.jit_compile = False
        if needs_communication(self) and self.steps_per_execution > 1 and not horovod_is_installed():
            raise InputError(
                f"Without Horovod steps_per_execution is 1. Received: {self.steps_per_execution}. Leave it out, or run "
                "`tfdist install_horovod`."
            )
        return make(self, *args, **kwargs)

    @functools.wraps(make_test)
    def make_test_function(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if is_initialized():
            self.jit_compile = False
        return make_test(self, *args, **kwargs)

    @functools.wraps(compile_model)
    def compile(self: keras.Model, *args: Any, experimental_run_tf_function: bool = False, **kwargs: Any) -> None:
        compile_model(self, *args, **kwargs)

    @functools.wraps(check)
    def check_finite(self: keras.optimizers.LossScaleOptimizer, grads: Any) -> tf.Tensor:
        finite = check(self, grads)
        inner: Any = self.inner_optimizer
        return agreed(finite, inner.reduction.options.process_set) if is_distributed(inner) else finite

    @functools.wraps(reduce)
    def __reduce__(self: keras.optimizers.LossScaleOptimizer) -> Any:
        if is_distributed(self.inner_optimizer):
            raise not_pickled(self)
        return reduce(self)

    keras.Model.make_train_function, keras.Model.make_test_function = make_train_function, make_test_function
    trainer.compile = compile
    scale.check_finite, scale.__reduce__ = check_finite, __reduce__


def needs_communication(model: keras.Model) -> bool:
    """Returns whether a model's training step communicates with the other ranks."""
    optimizer = getattr(model, "optimizer", None)
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        return True
    return any(getattr(layer, "speaks_to_other_ranks", False) for layer in model._flatten_layers())


def agreed(finite: tf.Tensor, process_set: Any) -> tf.Tensor:
    """Returns whether a scalar bool is true on every rank of a set that has not joined; one small message."""
    collectives = engine().collectives_of(process_set)
    failed = tf.cast(tf.logical_not(finite), tf.float32)  # a rank that has joined adds 0
    [count] = collectives.all_reduce([tf.reshape(failed, [1])], name="finite")
    return tf.equal(count[0], 0.0)


at_start(train_with_communication)
