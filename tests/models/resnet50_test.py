"""ResNet-50."""

import pytest

from tfdist.errors import InputError
from tfdist.layers import SyncBatchNormalization
from tfdist.models import resnet50


def test_synchronised():
    model = resnet50(input_shape=(32, 32, 1), classes=3, batch_norm="synchronized")
    assert sum(type(layer) is SyncBatchNormalization for layer in model.layers) == 53
    assert model.get_layer("conv1_bn").name == "conv1_bn"
    assert model.output_shape == (None, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (28, 28, 1)}, r"at least 32. Received: \(28, 28, 1\). Use --model=cnn"),
        ({"input_shape": (32, 32)}, r"must be \(height, width, channels\)"),
        ({"classes": -1}, "classes must be"),
        ({"batch_norm": "global"}, "not known"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        resnet50(**({"input_shape": (32, 32, 3), "classes": 3} | arguments))
