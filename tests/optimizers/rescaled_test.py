"""Updates with a rescaled learning rate, which depend on a private API of Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import keras_internals


@pytest.mark.parametrize(
    "rate", [0.5, keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 1.0)], ids=["one", "several"]
)
def test_updates_with_a_part_of_the_rate(rate):
    """Also for weight decay, which reads the learning rate separately."""
    optimizer = keras.optimizers.SGD(rate, weight_decay=0.1)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    wanted = 1.0
    for factor, now in ((0.5, 0.5), (1, 0.25 if callable(rate) else 0.5)):
        with keras_internals.scaled_learning_rate(optimizer, factor):
            optimizer.apply([tf.constant([1.0])])
        wanted -= factor * now * (1 + 0.1 * wanted)
        np.testing.assert_allclose(variable.numpy(), [wanted], rtol=1e-6)
        assert "_get_current_learning_rate" not in vars(optimizer)
