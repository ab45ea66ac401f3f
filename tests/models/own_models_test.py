"""The multilayer perceptron, the convolutional classifier, ResNet-50 and the decoder language model."""

from typing import Any

import keras
import numpy as np

from tfdist.layers import SyncBatchNormalization
from tfdist.models import cnn, mlp, resnet50, transformer

SMALL: dict[str, Any] = {"input_shape": (6,), "classes": 11, "layers": 2, "width": 8, "heads": 2}
TOKENS = np.arange(12).reshape(2, 6) % 11


def test_an_mlp_takes_any_shape_of_example():
    assert mlp(input_shape=(4,), classes=3, hidden=()).count_params() == 4 * 3 + 3
    assert mlp(input_shape=(2, 2, 1), classes=3, hidden=5).count_params() == 4 * 5 + 5 + 5 * 3 + 3
    names = [layer.name for layer in mlp(input_shape=(4,), classes=3, hidden=(2, 2)).layers]
    assert names == ["inputs", "flatten", "hidden_0", "hidden_1", "logits"]


def norms(model):
    return [type(layer) for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]


def test_a_cnn_has_no_bias_before_a_normalisation():
    model = cnn(input_shape=(8, 8, 1), classes=10)
    assert "conv_0/bias" not in {variable.path for variable in model.variables}
    assert model.get_layer("pool_1").output.shape == (None, 2, 2, 64)


def test_a_cnn_with_batch_norm_of_either_kind_has_the_same_variables():
    local = cnn(input_shape=(8, 8, 1), classes=10, batch_norm="local")
    synchronized = cnn(input_shape=(8, 8, 1), classes=10, batch_norm="synchronized")
    assert norms(local) == [keras.layers.BatchNormalization] * 2
    assert norms(synchronized) == [SyncBatchNormalization] * 2
    assert [v.path for v in local.variables] == [v.path for v in synchronized.variables]


def test_a_cnn_never_pools_small_images_away():
    assert cnn(input_shape=(3, 1, 2), classes=4, filters=(2, 2, 2)).output_shape == (None, 4)


def test_a_synchronized_resnet50():
    model = resnet50(input_shape=(32, 32, 1), classes=3, batch_norm="synchronized")
    assert sum(type(layer) is SyncBatchNormalization for layer in model.layers) == 53
    assert model.get_layer("conv1_bn").name == "conv1_bn"
    assert model.output_shape == (None, 3)


def test_a_token_sees_itself_and_what_is_before_it():
    model = transformer(**SMALL)
    changed = TOKENS.copy()
    changed[:, 3] += 1
    differs = np.abs(model(TOKENS) - model(changed)).max(axis=(0, 2)) > 1e-6
    assert differs.tolist() == [False, False, False, True, True, True]


def test_a_transformer_without_dropout_has_no_random_layer():
    assert not [layer for layer in transformer(**SMALL).layers if isinstance(layer, keras.layers.Dropout)]
    random = transformer(**SMALL, dropout=0.5)
    paths = [variable.path for variable in random.variables]
    assert len(set(paths)) == len(paths)
    assert np.abs(random(TOKENS, training=True) - random(TOKENS, training=True)).max() > 0
    assert np.abs(random(TOKENS) - random(TOKENS)).max() == 0
