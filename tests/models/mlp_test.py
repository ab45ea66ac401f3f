"""The multilayer perceptron."""

import pytest

from tfdist.errors import InputError
from tfdist.models import mlp


def test_any_shape_of_example():
    assert mlp(input_shape=(4,), classes=3, hidden=()).count_params() == 4 * 3 + 3
    assert mlp(input_shape=(2, 2, 1), classes=3, hidden=5).count_params() == 4 * 5 + 5 + 5 * 3 + 3
    assert [layer.name for layer in mlp(input_shape=(4,), classes=3, hidden=(2, 2)).layers] == [
        "inputs",
        "flatten",
        "hidden_0",
        "hidden_1",
        "logits",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (None,)}, "mlp: an example's shape must have known sizes only. Received: \\(None,\\)"),
        ({"hidden": (8, 0)}, "mlp: hidden must be integers"),
        ({"hidden": "8"}, "mlp: hidden must be integers"),
        ({"classes": 0}, "mlp: classes must be an integer, at least 1. Received: 0"),
        ({"classes": True}, "mlp: classes must be"),
        ({"classes": None}, r"The data set does not know it: write mlp\(classes=...\)."),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        mlp(**({"input_shape": (4,), "classes": 3} | arguments))
