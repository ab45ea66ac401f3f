"""Keras's optimizers and losses by name."""

import keras
import pytest

from tfdist.errors import InputError
from tfdist.keras_objects import create_loss, create_optimizer


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop", "adagrad", "adafactor", "lion"])
def test_optimizers(name):
    optimizer = create_optimizer(name, 0.25)
    assert type(optimizer).__name__.lower() == name
    assert float(optimizer.learning_rate) == 0.25


def test_arguments_of_an_optimizer():
    optimizer = create_optimizer("sgd(momentum=0.9, nesterov=True)", 0.1)
    assert (optimizer.momentum, optimizer.nesterov) == (0.9, True)
    assert float(create_optimizer("sgd(learning_rate=0.5)", 0.1).learning_rate) == 0.5


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mean_squared_error", keras.losses.MeanSquaredError),
        ("sparse_categorical_crossentropy", keras.losses.SparseCategoricalCrossentropy),
        ("huber", keras.losses.Huber),
        ("kldivergence", keras.losses.KLDivergence),
        ("log_cosh", keras.losses.LogCosh),
    ],
)
def test_losses(name, kind):
    assert type(create_loss(name)) is kind


def test_arguments_of_a_loss():
    assert create_loss("sparse_categorical_crossentropy(from_logits=True, reduction='sum')").get_config()["from_logits"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sdg", "--optimizer=sdg is not known.*sgd"),
        ("lossscaleoptimizer", "is not known"),
        ("optimizer", "is not known"),
        ("sgd(momentun=0.9)", "momentun.*momentum"),
        ("collections:ChainMap", "must make a keras.Optimizer. Received: ChainMap"),
    ],
)
def test_wrong_optimizers(text, message):
    with pytest.raises(InputError, match=message):
        create_optimizer(text, 0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mean_square_error", "--loss=mean_square_error is not known.*mean_squared_error"),
        ("loss", "is not known"),
        ("huber(delt=1.0)", "delt.*delta"),
        ("collections:ChainMap", "must make a keras.Loss. Received: ChainMap"),
    ],
)
def test_wrong_losses(text, message):
    with pytest.raises(InputError, match=message):
        create_loss(text)


def test_a_user_s_own(tmp_path, monkeypatch):
    (tmp_path / "own_keras_objects.py").write_text(
        "import keras\n"
        "def slow(learning_rate): return keras.optimizers.SGD(learning_rate / 10)\n"
        "class Far(keras.losses.MeanSquaredError): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert float(create_optimizer("own_keras_objects:slow", 1.0).learning_rate) == pytest.approx(0.1)
    assert type(create_loss("own_keras_objects:Far")).__name__ == "Far"
