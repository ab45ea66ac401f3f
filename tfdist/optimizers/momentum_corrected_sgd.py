"""SGD whose momentum does not depend on past learning rates."""

import keras
import tensorflow as tf
from keras import ops


@keras.saving.register_keras_serializable(package="tfdist")
class MomentumCorrectedSGD(keras.optimizers.SGD):
    r"""`keras.optimizers.SGD` with momentum correction (Goyal et al., arXiv:1706.02677, section 3).

    For a variable w with gradient g, momentum m and the learning rate r_t of this update:

        u = m u + g
        w = w - r_t u                    nesterov: w - r_t (m u + g)

    Keras's SGD has the rate inside its velocity, v = m v + r_t g: while the rate grows, past gradients count too
    little, and while it falls, too much. The paper corrects v by r_t / r_(t-1), which makes it r_t u. Here u itself is
    stored, which is equivalent, needs no past rate, and allows a rate of zero. With a constant rate, and without
    momentum, this is Keras's SGD up to rounding. Memory: one momentum variable per variable. The arguments are those of
    `keras.optimizers.SGD`.
    """

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        """See base class."""
        if not self.momentum:
            super().update_step(gradient, variable, learning_rate)
            return
        rate = ops.cast(learning_rate, variable.dtype)
        step = ops.cast(ops.convert_to_tensor(gradient), variable.dtype)
        slot = self.momentums[self._get_variable_index(variable)]
        velocity = self.momentum * ops.convert_to_tensor(slot) + step
        self.assign(slot, velocity)
        self.assign_sub(variable, rate * (self.momentum * velocity + step if self.nesterov else velocity))
