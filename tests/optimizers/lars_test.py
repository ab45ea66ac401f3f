"""LARS equals the paper's algorithm in NumPy, on one replica and on two; Keras saves and loads it."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.optimizers.comparisons import rates
from tfdist.optimizers import LARS, WarmupAndDecay

RATES = WarmupAndDecay(2.0, warmup_steps=4, warmup_start=0.25)
CASES = (
    {},
    {"weight_decay": 0.01},
    {"weight_decay": 0.01, "nesterov": True},
    {"weight_decay": 0.01, "momentum": 0.0},
    {"weight_decay": 0.01, "momentum_correction": True},
    {"weight_decay": 0.01, "momentum_correction": True, "nesterov": True},
    {"weight_decay": 0.01, "exclude_from_weight_decay": (), "exclude_from_layer_adaptation": "^(kernel|scalar)$"},
    {"weight_decay": 0.01, "trust_coefficient": 0.1, "epsilon": 1.0},
)


DEFAULTS = {"momentum": 0.9, "weight_decay": 0.0, "nesterov": False, "momentum_correction": False}
DEFAULTS |= {"trust_coefficient": 0.001, "epsilon": 1e-8}


def reference(starts, gradients, rates, *, adaptation_exclusions, decay_exclusions, **options):
    """Runs algorithm 1 of the paper; with momentum correction, the learning rate of the step multiplies the velocity."""
    momentum, b, nesterov, corrected, h, epsilon = ({**DEFAULTS, **options}[name] for name in DEFAULTS)
    w = {path: value.copy() for path, value in starts.items()}
    v = {path: np.zeros_like(value) for path, value in starts.items()}
    for rate, step in zip(rates, gradients, strict=True):
        for path, g in step.items():
            decay = 0.0 if path in decay_exclusions else b
            size = np.linalg.norm(g) + decay * np.linalg.norm(w[path])
            trust = 1.0 if path in adaptation_exclusions or not size else h * np.linalg.norm(w[path]) / (size + epsilon)
            change = trust * (g + decay * w[path])
            if corrected:
                v[path] = momentum * v[path] + change
                w[path] = w[path] - rate * (momentum * v[path] + change if nesterov else v[path])
            else:
                v[path] = momentum * v[path] + rate * change
                w[path] = w[path] - (momentum * v[path] + rate * change if nesterov else v[path])
    return w


@pytest.mark.parametrize(
    ("strategy", "options"), [*(("single", case) for case in CASES), ("mirrored2", CASES[2]), ("mirrored2", CASES[4])]
)
def test_equals_the_paper(strategy, options, starts, gradients, train, float64, request):
    found = train(request.getfixturevalue(strategy), lambda: LARS(RATES, **options))
    expected = reference(
        starts,
        gradients,
        rates(RATES, range(len(gradients))),
        adaptation_exclusions={"kernel", "scalar"} if "exclude_from_layer_adaptation" in options else {"bias"},
        decay_exclusions=set() if "exclude_from_weight_decay" in options else {"bias"},
        **options,
    )
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-12, atol=1e-13, err_msg=path)
        assert np.abs(value - starts[path]).max() > 1e-5, "the test would not see a variable that stays"


def test_equals_the_paper_in_float32(starts, gradients, train, mirrored2):
    found = train(mirrored2, lambda: LARS(RATES, weight_decay=0.01))
    sets = {"adaptation_exclusions": {"bias"}, "decay_exclusions": {"bias"}}
    expected = reference(starts, gradients, rates(RATES, range(len(gradients))), weight_decay=0.01, **sets)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-6, atol=1e-6, err_msg=path)


def test_a_variable_of_zeros_starts_and_nothing_divides_by_zero():
    zeros = keras.Variable(np.zeros(3), name="kernel")
    optimizer = LARS(0.5, momentum=0.0, epsilon=0.0)
    optimizer.apply([tf.zeros(3)], [zeros])
    np.testing.assert_array_equal(zeros, np.zeros(3))
    optimizer.apply([tf.ones(3)], [zeros])
    np.testing.assert_array_equal(zeros, np.full(3, -0.5))


def test_a_gradient_of_zeros_still_decays():
    kernel = keras.Variable(np.full(3, 2.0), name="kernel")
    LARS(1.0, momentum=0.0, epsilon=0.0, weight_decay=0.1).apply([tf.zeros(3)], [kernel])
    np.testing.assert_allclose(kernel, np.full(3, 2.0 * (1 - 0.001)), rtol=1e-6)


def test_half_precision_computes_norms_in_float32():
    kernel = keras.Variable(np.full(1000, 100.0), dtype="float16", name="kernel")  # the sum of squares is 1e7
    LARS(1.0, momentum=0.0, trust_coefficient=0.1).apply([tf.ones(1000, tf.float16)], [kernel])
    np.testing.assert_allclose(kernel, np.full(1000, 90.0), rtol=1e-3)


def test_rows_of_an_embedding_are_a_gradient():
    table = keras.Variable(np.ones((3, 2)), name="embeddings")
    rows = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([3, 2]))
    LARS(1.0, momentum=0.0, trust_coefficient=1.0).apply([rows], [table])
    np.testing.assert_allclose(table, [[1, 1], [1 - 3**0.5, 1 - 3**0.5], [1, 1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "excluded"),
    [
        ("dense/kernel", False),
        ("dense/bias", True),
        ("batch_normalization_3/gamma", True),
        ("block/layer_norm/beta", True),
        ("block/RMSNorm/scale", True),
        ("norm_free_net/dense/kernel", False),
        ("attention/query/kernel", False),
        ("attention/key/bias", True),
        ("embedding/embeddings", False),
    ],
)
def test_biases_and_norms_are_excluded_unless_told_otherwise(path, excluded):
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        variable = keras.Variable(np.ones(2), name=name)
    assert variable.path == path
    optimizer = LARS()
    optimizer.build([variable])
    assert (optimizer.uses_decay, optimizer.uses_adaptation) == ([not excluded], [not excluded])
    wanted = LARS(exclude_from_weight_decay=(), exclude_from_layer_adaptation=())
    wanted.build([variable])
    assert (wanted.uses_decay, wanted.uses_adaptation) == ([True], [True])


def test_the_method_of_keras_excludes_too():
    first, second = (keras.Variable(np.ones(2), name=name) for name in ("one", "one_more"))
    optimizer = LARS(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[first])
    optimizer.build([first, second])
    assert optimizer.uses_decay == [False, True]
    with pytest.raises(ValueError, match="before the optimizer is built"):
        optimizer.exclude_from_weight_decay(var_names=["one"])


def test_keras_saves_and_loads_it(single, tmp_path):
    keras.utils.set_random_seed(0)
    x, y = np.random.default_rng(0).standard_normal((2, 32, 4)).astype("float32")
    with single.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        optimizer = LARS(RATES, weight_decay=0.01, nesterov=True, exclude_from_weight_decay="none")
        trainer = tfdist.Trainer(model, optimizer=optimizer, loss="mse")
    trainer.fit((x, y), batch_size=8, steps=3)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LARS
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    for each in (loaded, model):  # both continue equally, including the schedule's step
        each.compile(optimizer=each.optimizer, loss="mse")
        each.train_on_batch(x, y)
    np.testing.assert_array_equal(*(each.layers[0].kernel for each in (loaded, model)))
