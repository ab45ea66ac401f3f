"""The convolutional classifier."""

import keras
import pytest

from tfdist.errors import InputError
from tfdist.layers import SyncBatchNormalization
from tfdist.models import cnn


def norms(model):
    return [type(layer) for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]


def test_no_bias_before_a_normalisation():
    model = cnn(input_shape=(8, 8, 1), classes=10)
    assert "conv_0/bias" not in {variable.path for variable in model.variables}
    assert model.get_layer("pool_1").output.shape == (None, 2, 2, 64)


def test_batch_norm_of_either_kind_has_the_same_variables():
    local = cnn(input_shape=(8, 8, 1), classes=10, batch_norm="local")
    synchronized = cnn(input_shape=(8, 8, 1), classes=10, batch_norm="synchronized")
    assert norms(local) == [keras.layers.BatchNormalization] * 2
    assert norms(synchronized) == [SyncBatchNormalization] * 2
    assert [v.path for v in local.variables] == [v.path for v in synchronized.variables]


def test_small_images_are_never_pooled_away():
    assert cnn(input_shape=(3, 1, 2), classes=4, filters=(2, 2, 2)).output_shape == (None, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (64,)}, r"cnn: an example's shape must be \(height, width, channels\). Received: \(64,\)"),
        ({"filters": (0,)}, "cnn: filters must be"),
        ({"batch_norm": "sync"}, 'Batch normalization "sync" is not known'),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        cnn(**({"input_shape": (8, 8, 1), "classes": 3} | arguments))
