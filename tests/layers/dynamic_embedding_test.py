"""Training `tfdist.layers.DynamicEmbedding` in this process, and with a server in this process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.parameter_server import embedding_tables_test
from tfdist.errors import InputError
from tfdist.gradients import Clip, LossScale
from tfdist.layers import DynamicEmbedding

FULL = pytest.mark.full
RNG = np.random.default_rng(0)
WORDS = [f"word{i}" for i in range(20)]
X = {"key": RNG.zipf(1.3, (64, 2)).astype(np.int64) * 10**12 - 3, "word": np.array(WORDS)[RNG.integers(0, 20, (64, 3))]}
Y = RNG.normal(size=(64, 1))
BATCHES = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
SGD = keras.optimizers.SGD


served = embedding_tables_test.served  # a fixture


def network(dropout=0.1):
    """Keys are integers, strings, and results of layers that look up or hash; one table is looked up twice."""
    key, word = keras.Input((2,), dtype="int64", name="key"), keras.Input((3,), dtype="string", name="word")
    item = DynamicEmbedding(4, admit_after=2, evict_after=3, name="item")
    first, second = item(key[:, 0]), item(key[:, 1])
    words = DynamicEmbedding(3, "random_normal", name="words")
    hashed = DynamicEmbedding(2, name="hashed")(keras.layers.Hashing(1000)(word))
    known = DynamicEmbedding(2, "zeros", name="known")(keras.layers.StringLookup(vocabulary=WORDS[:9])(word))
    parts = [keras.layers.Flatten()(part) for part in (words(word), hashed, known)]
    x = keras.layers.Concatenate()([first, second, first * second, *parts])
    x = keras.layers.Dense(8, activation="tanh")(keras.layers.Dropout(dropout)(x))
    return keras.Model([key, word], keras.layers.Dense(1)(x))


def made(strategy, make=network, *args, **options):
    return embedding_tables_test.made(strategy, make, *args, **options)


def trained(strategy, *args, steps=10, **options):
    trainer = made(strategy, *args, **options)
    trainer.fit(X, Y, batch_size=16, steps=steps, verbose=0)
    return trainer


def tables(model):
    return {layer.name: layer.table.export() for layer in model.layers if isinstance(layer, DynamicEmbedding)}


def values(model, optimizer):
    dense = [np.asarray(v.value) for v in (*model.variables, *optimizer.variables)]
    return [*dense, *(array for table in tables(model).values() for array in table.values())]


def assert_equal(first, second):
    for a, b in zip(values(first, first.optimizer), values(second, second.optimizer), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("staleness", "optimizer", "options"),
    [
        ("sync", lambda: SGD(0.1, momentum=0.9), {}),
        ("async", lambda: "adamw", {"clip": Clip(norm=0.5)}),
        pytest.param("bounded(0)", lambda: "adagrad", {"clip": Clip(norm=0.5)}, marks=FULL),
    ],
)
def test_one_worker_gives_the_result_of_one_device_bit_for_bit(staleness, optimizer, options, served, single, float64):
    expected = trained(single, network, optimizer(), **options)
    strategy = served(staleness=staleness)
    found = trained(strategy, network, optimizer(), **options)
    assert_equal(found.model, expected.model)
    counts = {name: len(table["keys"]) for name, table in tables(found.model).items()}
    assert counts["item"] < len(np.unique(X["key"])) and counts["words"] == 20 and counts["known"] == 10
    assert len(tables(found.model)["item"]["candidates"])
    assert "4 tables with a row per key" in strategy.remote.description
    assert "item/embeddings: " in strategy.remote.describe_row_use()[0]
    before = tables(found.model)
    others = {"key": X["key"] + 1, "word": X["word"]}
    for trainer in (found, expected):
        trainer.evaluate((others, Y), batch_size=16)
    assert found.evaluate((X, Y), batch_size=16) == expected.evaluate((X, Y), batch_size=16)
    np.testing.assert_array_equal(found.model(others), expected.model(others))
    for name, table in tables(found.model).items():
        np.testing.assert_array_equal(table["candidates"], before[name]["candidates"])  # evaluations count nothing


@pytest.mark.parametrize("to_servers", [False, True], ids=["to one device", "to servers"])
def test_checkpoints_of_other_strategies(to_servers, served, single, float64, tmp_path):
    here, there = (single, served()) if to_servers else (served(), single)
    first, second = made(here), made(there)
    checkpoints = tfdist.Checkpoints(directory=str(tmp_path), every=4)
    first.fit(X, Y, batch_size=16, steps=4, checkpoints=checkpoints, verbose=0)
    second.build((X, Y))
    assert second.resume(str(tmp_path)) == 4
    assert_equal(second.model, first.model)
    first.fit(X, Y, batch_size=16, steps=4, verbose=0)
    second.fit(X, Y, batch_size=16, steps=8, verbose=0)  # counted from the beginning of the resumed run
    assert_equal(second.model, first.model)


@pytest.mark.parametrize("on_servers", [False, True], ids=["of one device", "of servers"])
def test_a_saved_model_has_the_rows_and_goes_on(on_servers, served, single, float64, tmp_path):
    trainer = trained(served() if on_servers else single, lambda: network(dropout=0))
    trainer.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(loaded, trainer.model)
    np.testing.assert_array_equal(loaded(X), trainer.model(X))
    others = {"key": X["key"] + 1, "word": X["word"]}
    np.testing.assert_array_equal(loaded.get_layer("item")(others["key"]), np.zeros((64, 2, 4)))
    loaded.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve([X["key"], tf.constant(X["word"])]), loaded(X))
    results = []
    for strategy in (single, served()):
        keras.utils.clear_session(free_memory=False)
        with strategy.scope():
            model = tfdist.distribute(keras.models.load_model(tmp_path / "model.keras"))
        model.fit(BATCHES, epochs=2, shuffle=False, verbose=0)
        results.append(values(model, model.optimizer))
        assert tables(model)["item"]["updates"] == 18
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-9)


def test_a_step_that_is_not_finite_counts_no_key(served, single):
    y = np.where(np.arange(64)[:, None] == 20, 1e30, Y)
    scale = LossScale(initial=2.0**10, growth_interval=100)
    results = []
    for strategy in (single, served()):
        trainer = made(strategy, lambda: network(dropout=0), loss_scale=scale)
        trainer.fit(X, y, batch_size=16, steps=4, shuffle=False, verbose=0)
        results.append(tables(trainer.model)["item"])
    assert results[0]["updates"] == results[1]["updates"] == 3
    np.testing.assert_array_equal(results[0]["candidates"], results[1]["candidates"])
    skipped = np.setdiff1d(X["key"][16:32], np.delete(X["key"], range(16, 32), 0))
    assert not np.isin(skipped, results[0]["candidates"]).any()


def keras_step():
    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    model = network()
    return Own(model.inputs, model.outputs)


def fitted(strategy, make):
    with strategy.scope():
        model = make()
        model.compile("sgd", "mse")
    tfdist.distribute(model, strategy).fit(BATCHES, shuffle=False, verbose=0)


def float_keys():
    return keras.Model(key := keras.Input((2,)), DynamicEmbedding(4)(key))


REFUSED = {
    "a count of zero": (lambda _: DynamicEmbedding(4, admit_after=0), "admit_after .* at least 1. Received: 0"),
    "a negative age": (lambda _: DynamicEmbedding(4, evict_after=-1), "evict_after .* at least 0. Received: -1"),
    "a fraction": (lambda _: DynamicEmbedding(4.5), "output_dim .* must be an integer of at least 1. Received: 4.5"),
    "an initializer": (lambda _: DynamicEmbedding(4, "glorot_uniform"), "RandomUniform, .* Received: GlorotUniform"),
    "float keys": (
        lambda _: float_keys(),
        'must be integers or strings. Received: float32. Use keras.Input.dtype="int64"',
    ),
    "other strategies": (
        lambda request: trained(request.getfixturevalue("mirrored2")),
        "with --strategy=parameter_server or single. Received: mirrored",
    ),
    "no strategy": (lambda _: network()(X, training=True), "Received: no strategy"),
    "micro-steps": (lambda request: trained(request.getfixturevalue("single"), accumulate_steps=2), "a single pass"),
    "micro-steps on servers": (
        lambda request: trained(request.getfixturevalue("served")(), accumulate_steps=2),
        "single pass .*Use no DynamicEmbedding",
    ),
    "XLA": (lambda request: trained(request.getfixturevalue("single"), jit_compile=True), "without XLA"),
    "a step of one's own": (
        lambda request: fitted(request.getfixturevalue("single"), keras_step),
        "Keras's own steps. Received: a custom train_step",
    ),
    "Lamb": (
        lambda request: trained(request.getfixturevalue("single"), network, keras.optimizers.Lamb()),
        "updates rows independently.* Received: Lamb",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(name, request):
    use, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        use(request)


def test_a_frozen_layer_is_only_looked_up(served):
    def frozen():
        model = network()
        model.get_layer("item").trainable = False
        return model

    trainer = trained(served(), frozen, steps=2)
    assert not len(tables(trainer.model)["item"]["keys"]) and len(tables(trainer.model)["words"]["keys"])


def test_ragged_keys_have_ragged_rows():
    rows = DynamicEmbedding(4)(tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64))
    assert rows.shape == [3, None, 4] and rows.row_lengths().numpy().tolist() == [2, 0, 1]
