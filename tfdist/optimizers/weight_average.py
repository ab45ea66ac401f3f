"""An exponential moving average of the weights, which the optimizer updates with every step."""

import keras

from tfdist.errors import InputError


def average_weights(optimizer: keras.Optimizer, momentum: float) -> None:
    """Lets an optimizer average the weights, as Keras's `use_ema` does, and never overwrite them.

    After update t with weights w_t, the average is

        a_1 = w_1,        a_t = momentum a_(t-1) + (1 - momentum) w_t

    It is part of the optimizer's state, so that it is stored, sharded and restored like momentum, and a skipped step
    does not change it. Memory: one variable per trainable variable.

    Args:
      optimizer: an optimizer without variables yet.
      momentum: in [0, 1); 0 leaves the optimizer as it is.

    Raises:
      InputError: the momentum is out of range, or the optimizer is already built.
    """
    if not 0 <= momentum < 1:
        raise InputError(f"ema must be at least 0 and less than 1, such as 0.999. Received: ema={momentum}.")
    if not momentum:
        return
    if optimizer.built:
        raise InputError(
            "The weights are averaged by an optimizer that has no variables yet. Received: "
            f"ema={momentum} and a built {type(optimizer).__name__}. Create a new optimizer."
        )
    optimizer.use_ema, optimizer.ema_momentum, optimizer.ema_overwrite_frequency = True, momentum, None
