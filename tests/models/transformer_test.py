"""The decoder language model."""

from typing import Any

import keras
import numpy as np
import pytest

from tfdist.errors import InputError
from tfdist.models import transformer

SMALL: dict[str, Any] = {"input_shape": (6,), "classes": 11, "layers": 2, "width": 8, "heads": 2}
TOKENS = np.arange(12).reshape(2, 6) % 11


def test_a_token_sees_itself_and_what_is_before_it():
    model = transformer(**SMALL)
    changed = TOKENS.copy()
    changed[:, 3] += 1
    differs = np.abs(model(TOKENS) - model(changed)).max(axis=(0, 2)) > 1e-6
    assert differs.tolist() == [False, False, False, True, True, True]


def test_a_token_knows_its_position():
    model = transformer(**SMALL)
    logits = model(np.zeros((1, 6), "int32"))[0]
    assert np.abs(logits[0] - logits[1]).max() > 1e-6
    assert "position_embedding/embeddings" in {v.path for v in model.trainable_variables}


def test_sizes():
    blocks = transformer(**(SMALL | {"layers": 3, "ffn": 5}))
    assert blocks.get_layer("block_2_ffn_in").kernel.shape == (8, 5)
    assert transformer(**SMALL).get_layer("block_1_ffn_in").kernel.shape == (8, 32)


def test_no_random_layer_without_dropout():
    assert not [layer for layer in transformer(**SMALL).layers if isinstance(layer, keras.layers.Dropout)]
    random = transformer(**SMALL, dropout=0.5)
    paths = [variable.path for variable in random.variables]
    assert len(set(paths)) == len(paths)
    assert np.abs(random(TOKENS, training=True) - random(TOKENS, training=True)).max() > 0
    assert np.abs(random(TOKENS) - random(TOKENS)).max() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (8, 8)}, r"transformer: an example's shape must be \(length,\). Received: \(8, 8\)"),
        ({"width": 9}, "width must be a multiple of heads. Received: width=9, heads=2"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\)"),
        ({"layers": 1.5}, "layers must be an integer"),
        ({"ffn": 0}, "ffn must be an integer"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=f"transformer: .*{message}|{message}"):
        transformer(**(SMALL | arguments))
