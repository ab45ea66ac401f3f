"""What Keras does differently where gradients are reduced inside its training step: two public methods, replaced once."""

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.horovod.distributed import is_distributed
from tfdist.horovod.process import engine, horovod_is_installed


@functools.cache
def train_with_communication() -> None:
    """Replaces `keras.Model.make_train_function` and `keras.optimizers.LossScaleOptimizer.check_finite`.

    A model whose optimizer is distributed trains without XLA, which can compile no communication. A loss scale around a
    distributed optimizer looks at this rank's gradients: then all ranks agree first, so that all apply or all skip.
    """
    make, check = keras.Model.make_train_function, keras.optimizers.LossScaleOptimizer.check_finite

    @functools.wraps(make)
    def make_train_function(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if needs_communication(self):
            self.jit_compile = False
            if self.steps_per_execution > 1 and not horovod_is_installed():
                raise InputError(
                    f"Without Horovod steps_per_execution is 1. Received: {self.steps_per_execution}. Leave it out, or run "
                    "`python -m tfdist.install_horovod`."
                )
        return make(self, *args, **kwargs)

    @functools.wraps(check)
    def check_finite(self: keras.optimizers.LossScaleOptimizer, grads: Any) -> tf.Tensor:
        finite = check(self, grads)
        return agreed(finite) if is_distributed(self.inner_optimizer) else finite

    keras.Model.make_train_function = make_train_function
    keras.optimizers.LossScaleOptimizer.check_finite = check_finite


def needs_communication(model: keras.Model) -> bool:
    """Whether a model's training step speaks to the other ranks."""
    optimizer = getattr(model, "optimizer", None)
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        return True
    return any(getattr(layer, "speaks_to_other_ranks", False) for layer in model._flatten_layers())


def agreed(finite: tf.Tensor) -> tf.Tensor:
    """Whether a scalar bool is true on every rank; one small message."""
    collectives = engine().collectives
    [count] = collectives.all_reduce([tf.reshape(tf.cast(finite, tf.float32), [1])], name="finite")
    return tf.equal(count[0], float(collectives.size))
