import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import InputError
from tfdist.layers import MixtureOfExperts

RANDOM = np.random.default_rng(4)
X = RANDOM.standard_normal((8, 12, 6)).astype("float32")


def made(experts=4, width=16, shape=(12, 6), **options):
    keras.utils.set_random_seed(1)
    layer = MixtureOfExperts(experts, width, **options)
    layer.build((None, *shape))
    return layer


def dense(layer, x, choices):
    """Computes every token with every expert, and combines the results of the chosen ones."""
    probabilities = tf.nn.softmax(tf.einsum("gsm,me->gse", x, layer.router))
    values, _ = tf.math.top_k(probabilities, choices)
    weights = tf.where(probabilities >= values[..., -1:], probabilities, 0.0)
    if choices > 1:
        weights /= tf.reduce_sum(weights, axis=-1, keepdims=True)
    inner = tf.einsum("gsm,emf->gsef", x, layer.in_kernel) + layer.in_bias
    outputs = tf.einsum("gsef,efm->gsem", keras.activations.gelu(inner), layer.out_kernel) + layer.out_bias
    return tf.einsum("gse,gsem->gsm", weights, outputs)


def with_gradients(function, layer, x):
    values = [v.value for v in layer.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = function(x)
        loss = tf.reduce_sum(tf.sin(outputs))
    return [outputs, *tape.gradient(loss, [x, *values])]


@pytest.mark.parametrize("choices", [1, 2])
def test_with_room_for_all_tokens_it_is_the_dense_evaluation(choices):
    layer = made(choices=choices, capacity_factor=4 / choices)
    for bias in (layer.in_bias, layer.out_bias):
        bias.assign(RANDOM.standard_normal(bias.shape))
    x = tf.constant(X)
    found = with_gradients(lambda x: layer(x, training=True), layer, x)
    expected = with_gradients(lambda x: dense(layer, x, choices), layer, x)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def on_a_mesh(shape, layout, **arguments):
    """Returns a layer's outputs for X on a mesh."""
    strategy = tfdist.load_strategy("mesh", mesh_shape=shape, layout=layout, environment={})
    with strategy.scope():
        layer = made(**arguments)
    rows = strategy.devices.place(X, tfdist.config.layouts.Layout(("data", None, None)))
    run = strategy.compiled(lambda x: strategy.run(lambda x: layer(x, training=True), x))
    return strategy.devices.full_tensor(run(rows))


LAYOUTS = [("data:2;model:2", "experts:model"), ("data:4", "experts:data")]


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
def test_expert_parallel_is_the_dense_evaluation(shape, layout):
    found = on_a_mesh(shape, layout, capacity_factor=2.0)
    np.testing.assert_allclose(found, dense(made(capacity_factor=2.0), tf.constant(X), 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
@pytest.mark.parametrize(("choices", "overflow"), [(1, "drop"), (1, "spill"), (2, "spill")])
def test_full_experts_take_the_same_tokens_on_a_mesh(shape, layout, choices, overflow):
    options = {"choices": choices, "overflow": overflow, "capacity_factor": 0.75}
    alone = made(**options)(X, training=True)
    np.testing.assert_allclose(on_a_mesh(shape, layout, **options), alone, rtol=1e-4, atol=1e-5)
    assert not np.allclose(alone, dense(made(**options), tf.constant(X), choices), atol=1e-3)


def test_tokens_of_a_full_expert_are_dropped_or_spilled():
    dropping, spilling = (made(choices=1, capacity_factor=1.0, overflow=overflow) for overflow in ("drop", "spill"))
    for layer in (dropping, spilling):
        layer.router.assign(np.eye(6, 4))
        layer(np.tile([[5.0, 1, 0, 0, 0, 0]], (1, 12, 1)).astype("float32"), training=True)
    found = {key: float(value) for key, value in dropping.load.result().items()}
    assert found["dropped"] == pytest.approx(9 / 12) and found["expert_0"] == 1
    assert found["load_cv"] == pytest.approx(3**0.5)
    found = {key: float(value) for key, value in spilling.load.result().items()}
    assert found["dropped"] == 0 and found["load_cv"] == 0


def test_padding_goes_nowhere():
    layer = made(capacity_factor=2.0)
    mask = np.arange(12) < np.arange(1, 9)[:, None]
    found = layer(X, mask=mask, training=True).numpy()
    assert np.all(found[~mask] == 0) and np.all(np.any(found[mask] != 0, axis=-1))
    assert float(tf.reduce_sum(layer.load.tokens)) == 2 * mask.sum()


def test_the_transformer_hands_its_options_on():
    model = tfdist.models.build("transformer(layers=2, width=8, heads=2, experts=4, overflow='spill')", (6,), 12)
    config = model.get_layer("block_1_experts").get_config()
    assert (config["experts"], config["overflow"]) == (4, "spill")
    with pytest.raises(InputError, match="overflow"):
        tfdist.models.build("transformer(experts=4, overflow='spil')", (6,), 12)


def test_experts_begin_as_dense_layers_do_and_differ():
    layer = made(width=64, shape=(12, 32))
    kernels = layer.in_kernel.numpy()
    assert len({kernel.tobytes() for kernel in kernels}) == 4
    limit = (6 / (32 + 64)) ** 0.5
    assert limit * 0.95 < np.abs(kernels).max() <= limit


def test_it_has_more_room_in_evaluation():
    layer = made(choices=1, capacity_factor=0.3, evaluation_capacity_factor=4.0)
    layer(X, training=True)
    assert float(layer.load.dropped) > 0
    layer.load.reset_state()
    layer(X, training=False)
    assert float(layer.load.dropped) == 0


def test_it_is_saved_with_all_its_arguments(tmp_path):
    options = {"choices": 1, "capacity_factor": 0.5, "overflow": "spill", "balance_weight": 0.1, "activation": "relu"}
    inputs = keras.Input((12, 6))
    model = keras.Model(inputs, MixtureOfExperts(4, 16, name="experts", **options)(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("experts").get_config() == model.get_layer("experts").get_config()
    np.testing.assert_array_equal(loaded(X), model(X))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": 0}, "experts must be at least 1. Received: 0"),
        ({"choices": 5}, "choices must be from 1 to the 4 experts. Received: 5"),
        ({"capacity_factor": 0}, "capacity_factor must be above 0. Received: 0"),
        ({"overflow": "keep"}, "overflow must be drop or spill. Received: keep"),
        ({"balance_weight": -1}, "balance_weight must be at least 0. Received: -1"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(InputError, match=message):
        MixtureOfExperts(**{"experts": 4, "width": 8, **arguments})


@pytest.mark.parametrize("shape", [(None, 6), (None, None, 6), (None, 12, None)])
def test_refuses_what_has_no_known_tokens(shape):
    with pytest.raises(InputError, match=r"must be \[batch, tokens, embed\] with the last two dims known"):
        MixtureOfExperts(4, 8).build(shape)


def trained(strategy, steps=300, **options):
    """Trains on four kinds of tokens, with a router that sends all to expert 0 at first; returns metrics before and after."""
    random = np.random.default_rng(0)
    kinds = random.integers(0, 4, (64, 16))
    x = (np.eye(4)[kinds] + 0.1 * random.standard_normal((64, 16, 4))).astype("float32")
    y = (x @ random.standard_normal((4, 4)) * (1 + kinds[..., None])).astype("float32")
    keras.utils.set_random_seed(2)
    with strategy.scope():
        inputs = keras.Input((16, 4))
        factors = {"capacity_factor": 4.0, "evaluation_capacity_factor": 4.0}
        layer = MixtureOfExperts(4, 8, choices=1, name="moe", **factors, **options)
        model = keras.Model(inputs, layer(inputs))
        router = layer.router.numpy()
        router[:, 0] += 3
        layer.router.assign(router)
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.Adam(0.01), loss="mse")
    before = trainer.evaluate((x, y), batch_size=16)
    history = trainer.fit((x, y), batch_size=16, steps=steps, schedule=tfdist.Schedule(log_every=50))
    return before, trainer.evaluate((x, y), batch_size=16), history


def test_the_balancing_loss_evens_the_load_and_without_it_the_experts_collapse(single):
    before, after, _ = trained(single, balance_weight=1.0)
    assert before["moe_load_cv"] > 1.5 and after["moe_load_cv"] < 0.5
    before, after, _ = trained(single, balance_weight=0.0)
    assert before["moe_load_cv"] > 1.5 and after["moe_load_cv"] > 1.2


def test_metrics_of_a_layer_are_those_of_all_replicas(single, mirrored2):
    expected, found = (trained(strategy, 20) for strategy in (single, mirrored2))
    for a, b in zip(expected[:2], found[:2], strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    names = [f"moe_expert_{i}" for i in range(4)]
    last = found[2].last("train")
    assert sum(last[name] for name in names) == pytest.approx(1)
    assert last["moe_dropped"] == 0


def test_loads_are_added_up_in_float32_where_layers_compute_in_16_bits(single, precision):
    precision("mixed_bfloat16")
    layer = made()
    for _ in range(40):
        layer(np.tile(X, (8, 1, 1)), training=False)
    assert float(tf.reduce_sum(layer.load.tokens) + layer.load.dropped) == 40 * 64 * 12 * 2


def test_micro_steps_and_other_calls_of_the_model_count_no_token_twice(single):
    records = []
    for micro_steps in (1, 4):
        keras.utils.set_random_seed(2)
        with single.scope():
            inputs = keras.Input((12, 6))
            model = keras.Model(inputs, MixtureOfExperts(4, 8, name="moe", evaluation_capacity_factor=4.0)(inputs))
            trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse", accumulate_steps=micro_steps)
        model(np.zeros([64, 12, 6], "float32"))
        records.append(trainer.fit((X, X), batch_size=8, steps=1, schedule=tfdist.Schedule(log_every=1)).last("train"))
        model(np.zeros([64, 12, 6], "float32"))
        records.append(trainer.evaluate((X, X), batch_size=8))
    one, evaluated, four, again = records
    for a, b in ((one, four), (evaluated, again)):
        names = [name for name in a if name.startswith("moe")]
        assert len(names) == 6 and {n: a[n] for n in names} == pytest.approx({n: b[n] for n in names}, abs=1e-6)
    assert one["moe_dropped"] > 0 == evaluated["moe_dropped"]


def test_layers_with_metrics_have_names_of_their_own(single):
    def tower(name):
        inputs = keras.Input((12, 6))
        return keras.Model(inputs, MixtureOfExperts(2, 4, name="experts")(inputs), name=name)

    with single.scope():
        inputs = keras.Input((12, 6))
        model = keras.Model(inputs, tower("second")(tower("first")(inputs)))
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse")
    with pytest.raises(InputError, match="must have unique names. Received twice: experts_load. Rename the layers"):
        trainer.fit((X, X), batch_size=8, steps=1)
