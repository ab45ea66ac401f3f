"""Models by name, and properties of all of them."""

import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import models
from tfdist.errors import InputError

# Spec, shape of one example, classes, parameters.
MODELS = [
    ("mlp", (8, 8, 1), 10, 50_826),
    ("cnn", (8, 8, 1), 10, 21_674),
    ("transformer", (16,), 256, 464_640),
    ("resnet50", (32, 32, 3), 10, 23_608_202),
]
SMALL = [
    ("mlp(hidden=(5,))", (4, 4, 1), 3),
    ("cnn(filters=(4, 4))", (4, 4, 1), 3),
    ('cnn(filters=(4, 4), batch_norm="synchronized")', (4, 4, 1), 3),
    ("transformer(layers=2, width=8, heads=2)", (6,), 11),
]


def batch(model, examples=4):
    rng = np.random.default_rng(0)
    shape = (examples, *model.input_shape[1:])
    classes = model.output_shape[-1]
    integers = model.inputs[0].dtype == "int32"
    x = rng.integers(0, classes, shape) if integers else rng.normal(size=shape)
    y = rng.integers(0, classes, (examples, *model.output_shape[1:-1]))
    return tf.constant(x, model.inputs[0].dtype), tf.constant(y)


def gradients(model, x, y):
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
    return loss, [tf.convert_to_tensor(g) for g in tape.gradient(loss, [v.value for v in model.trainable_variables])]


@pytest.mark.parametrize(("spec", "shape", "classes", "parameters"), MODELS)
def test_shapes_sizes_and_paths(spec, shape, classes, parameters):
    model = models.build(spec, shape, classes)
    assert model.input_shape == (None, *shape)
    assert model.output_shape[-1] == classes
    assert model.count_params() == parameters
    paths = [variable.path for variable in model.variables]
    assert len(set(paths)) == len(paths)
    assert [variable.path for variable in models.build(spec, shape, classes).variables] == paths
    assert "tfdist" not in model.to_json()  # Keras alone can load it
    assert model.layers[-1].activation is keras.activations.linear


def test_the_table_is_complete():
    assert {spec for spec, *_ in MODELS} == set(models.NAMES)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("spec", "shape", "classes"), SMALL)
def test_a_step_in_float64(spec, shape, classes):
    keras.utils.set_random_seed(0)  # the dropout of the second loss differs, which may raise it
    model = models.build(spec, shape, classes)
    assert {variable.dtype for variable in model.variables} == {"float64"}
    x, y = batch(model)
    optimizer = keras.optimizers.SGD(0.01)
    before, grads = gradients(model, x, y)
    optimizer.apply(grads, model.trainable_variables)
    after, _ = gradients(model, x, y)
    assert model(x).dtype == tf.float64
    assert after < before


@pytest.mark.parametrize(("spec", "shape", "classes"), SMALL)
def test_forward_and_backward_compile(spec, shape, classes):
    model = models.build(spec, shape, classes)
    x, y = batch(model)
    weights = [variable.numpy() for variable in model.variables]
    compiled = tf.function(lambda x, y: gradients(model, x, y), jit_compile=True, autograph=False)
    loss, grads = compiled(x, y)
    for variable, value in zip(model.variables, weights, strict=True):
        variable.assign(value)  # the moving statistics
    expected_loss, expected = gradients(model, x, y)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for gradient, wanted in zip(grads, expected, strict=True):
        assert np.linalg.norm(gradient - wanted) <= 1e-4 * np.linalg.norm(wanted) + 1e-6


def test_resnet50_compiles_forward():
    model = models.build("resnet50", (32, 32, 3), 10)
    x, _ = batch(model, examples=1)
    compiled = tf.function(lambda x: model(x, training=False), jit_compile=True, autograph=False)
    np.testing.assert_allclose(compiled(x), model(x, training=False), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("spec", "shape", "classes"), [*SMALL, ("resnet50", (32, 32, 3), 10)])
def test_exactly_the_named_variables_have_a_gradient_of_zero(spec, shape, classes):
    model = models.build(spec, shape, classes)
    _, grads = gradients(model, *batch(model))
    patterns = models.zero_gradient_patterns(spec)
    named = {v.path for v in model.trainable_variables if any(re.search(p, v.path) for p in patterns)}
    scale = max(np.linalg.norm(g) for g in grads)
    zero = {v.path for v, g in zip(model.trainable_variables, grads, strict=True) if np.linalg.norm(g) <= 1e-12 * scale}
    assert zero == named
    assert bool(named) == bool(patterns)


def test_zero_gradient_patterns_of_others():
    assert models.zero_gradient_patterns("nobodys") == ()
    assert models.zero_gradient_patterns("a.b:c(d=1)") == ()


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    def write(text):
        (tmp_path / "model_of_a_user.py").write_text("import keras\n" + text)
        monkeypatch.syspath_prepend(tmp_path)
        sys.modules.pop("model_of_a_user", None)
        return "model_of_a_user:"

    yield write
    sys.modules.pop("model_of_a_user", None)


DENSE = "return keras.Sequential([keras.Input({}), keras.layers.Dense({})])\n"


@pytest.mark.parametrize(
    ("signature", "body", "spec", "shapes"),
    [
        ("", DENSE.format("(7,)", 5), "f", (7, 5)),
        ("input_shape", DENSE.format("input_shape", 5), "f", (3, 5)),
        ("classes, width=5", DENSE.format("(width,)", "classes"), "f(width=6)", (6, 2)),
        ("*, classes, input_shape", DENSE.format("input_shape", "classes"), "f(classes=9)", (3, 9)),
        ("**options", DENSE.format("(7,)", "options['n']"), "f(n=4)", (7, 4)),
    ],
)
def test_a_users_function(user_module, signature, body, spec, shapes):
    name = user_module(f"def f({signature}):\n    {body}")
    model = models.build(name + spec, (3,), 2)
    assert (model.input_shape[1], model.output_shape[1]) == shapes


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        ("def f(): return 3", "f", "must return a keras.Model. Received: int"),
        ("f = 3", "f", "must name a function. Received: int."),
    ],
)
def test_what_is_wrong_with_a_users_function(user_module, text, spec, message):
    with pytest.raises(InputError, match=message) as error:
        models.build(user_module(text) + spec, (3,), 2)
    assert "\n" not in str(error.value)


ARGUMENTS = {
    "mlp": {"input_shape": (4,), "classes": 3},
    "cnn": {"input_shape": (8, 8, 1), "classes": 3},
    "resnet50": {"input_shape": (32, 32, 3), "classes": 3},
    "transformer": {"input_shape": (6,), "classes": 11, "layers": 2, "width": 8, "heads": 2},
}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("mlp", {"input_shape": (None,)}, r"mlp: an example's shape must have known sizes only. Received: \(None,\)"),
        ("mlp", {"classes": True}, "mlp: classes must be"),
        ("mlp", {"classes": None}, r"The dataset does not define it: pass mlp\(classes=...\)."),
        ("cnn", {"batch_norm": "sync"}, 'Batch normalization "sync" is not known'),
        ("resnet50", {"input_shape": (28, 28, 1)}, r"at least 32. Received: \(28, 28, 1\). Use --model=cnn"),
        ("resnet50", {"input_shape": (32, 32)}, r"must be \(height, width, channels\)"),
        ("resnet50", {"classes": -1}, "classes must be"),
        ("resnet50", {"batch_norm": "global"}, "not known"),
        ("transformer", {"width": 9}, "transformer: .*width must be a multiple of heads. Received: width=9, heads=2"),
    ],
)
def test_bad_arguments(name, arguments, message):
    with pytest.raises(InputError, match=message):
        getattr(models, name)(**(ARGUMENTS[name] | arguments))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mlp(hiden=(3,))", 'mlp has no parameter "hiden".*Did you mean "hidden"'),
        ("mlp(hidden=-3)", "--model=mlp.hidden=-3. must not fail. Received: ValueError: .*units=-3"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(InputError, match=message) as error:
        models.build(spec, (8, 8, 1), 10)
    assert "\n" not in str(error.value)
