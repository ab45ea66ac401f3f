"""Keras's optimizers, losses and metrics by name."""

import inspect

import keras
import pytest

from tfdist import optimizers
from tfdist.errors import InputError
from tfdist.optimizers.catalog import create_loss, create_metrics, create_optimizer

LOSSES = """
binary_crossentropy binary_focal_crossentropy categorical_crossentropy categorical_focal_crossentropy
categorical_generalized_cross_entropy categorical_hinge circle cosine_similarity ctc dice hinge huber kl_divergence log_cosh
mean_absolute_error mean_absolute_percentage_error mean_squared_error mean_squared_logarithmic_error poisson
sparse_categorical_crossentropy squared_hinge tversky
""".split()
SHORT_LOSSES = ["bce", "kld", "mae", "mape", "mse", "msle"]
OPTIMIZERS = """
adadelta adafactor adagrad adam adamax adamw ftrl lamb lion muon nadam rmsprop schedulefreeadamw sgd
""".split()


def classes(module, base, without):
    """Returns Keras's public classes by lower-case name, without names that only differ in spelling."""
    found = inspect.getmembers(module, lambda x: inspect.isclass(x) and issubclass(x, base))
    return {name.lower() for name, _ in found} - set(without)


@pytest.mark.parametrize(
    ("names", "module", "base", "without"),
    [
        (LOSSES, keras.losses, keras.Loss, ["loss"]),
        (OPTIMIZERS, keras.optimizers, keras.Optimizer, ["optimizer", "lossscaleoptimizer", "multioptimizer"]),
    ],
)
def test_the_tables_below_have_all_of_keras_s(names, module, base, without):
    assert {name.replace("_", "") for name in names} == classes(module, base, without)


def of_optimizer(text):
    return create_optimizer(text, 0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    optimizer = create_optimizer(name, 0.25)
    assert type(optimizer).__name__.lower() == name
    assert float(optimizer.learning_rate) == 0.25


def test_arguments_of_an_optimizer():
    optimizer = create_optimizer("sgd(momentum=0.9, nesterov=True)", 0.1)
    assert (optimizer.momentum, optimizer.nesterov) == (0.9, True)
    assert float(create_optimizer("sgd(learning_rate=0.5)", 0.1).learning_rate) == 0.5


@pytest.mark.parametrize("name", [*LOSSES, *SHORT_LOSSES])
def test_losses(name):
    """A loss is found by the name that Keras uses for its function."""
    made = create_loss(name)
    if name == "categorical_generalized_cross_entropy":  # Keras only has the class of this one
        assert type(made) is keras.losses.CategoricalGeneralizedCrossEntropy
    else:
        assert made.fn is keras.losses.get(name)


def test_metrics():
    assert create_metrics("f1_score, accuracy, ce") == ["f1_score", "accuracy", "ce"]


def test_arguments_of_a_loss():
    assert create_loss("sparse_categorical_crossentropy(from_logits=True, reduction='sum')").get_config()["from_logits"]


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        (of_optimizer, "sdg", "--optimizer=sdg is not known.*sgd"),
        (of_optimizer, "lossscaleoptimizer", "is not known"),
        (of_optimizer, "optimizer", "is not known"),
        (of_optimizer, "sgd(momentun=0.9)", "momentun.*momentum"),
        (of_optimizer, "collections:ChainMap", "must create a keras.Optimizer. Received: ChainMap"),
        (create_loss, "mean_square_error", "--loss=mean_square_error is not known.*mean_squared_error"),
        (create_loss, "loss", "is not known"),
        (create_loss, "huber(delt=1.0)", "delt.*delta"),
        (create_loss, "collections:ChainMap", "must create a keras.Loss. Received: ChainMap"),
        (create_metrics, "f1score", '--metrics=f1score is not known. Did you mean "f1_score"'),
        (create_metrics, "mean_io_u", r"Received: mean_io_u \(\w+.__init__\(\) missing .*Pass such a metric to"),
    ],
)
def test_wrong_names_and_arguments(make, text, message):
    with pytest.raises(InputError, match=message):
        make(text)


def test_a_user_s_own(tmp_path, monkeypatch):
    (tmp_path / "own_keras_objects.py").write_text(
        "import keras\n"
        "def slow(learning_rate): return keras.optimizers.SGD(learning_rate / 10)\n"
        "class Far(keras.losses.MeanSquaredError): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert float(create_optimizer("own_keras_objects:slow", 1.0).learning_rate) == pytest.approx(0.1)
    assert type(create_loss("own_keras_objects:Far")).__name__ == "Far"


def test_optimizers_of_our_own_and_momentum_correction():
    assert isinstance(create_optimizer("lars(momentum=0.8)", 0.1), optimizers.LARS)
    assert create_optimizer("lars", 0.1, momentum_correction=True).momentum_correction
    assert type(create_optimizer("sgd(momentum=0.9)", 0.1)) is keras.optimizers.SGD
    assert type(create_optimizer("sgd(momentum=0.9)", 0.1, momentum_correction=True)) is optimizers.MomentumCorrectedSGD
    schedule = optimizers.make_learning_rate(0.1, warmup_steps=3)
    assert float(create_optimizer("adamw", schedule).learning_rate) == 0.0
