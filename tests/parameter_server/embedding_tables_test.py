"""Training with embeddings of which the worker has no copy, with a server in this process."""

import functools

import keras
import numpy as np
import pytest

import tfdist
from tfdist.errors import InputError

FULL = pytest.mark.full
RNG = np.random.default_rng(0)
WORDS = [f"word{i}" for i in range(30)]
X = {"words": np.array(WORDS)[RNG.integers(0, 30, (64, 3))], "pair": RNG.integers(0, 40, (64, 2))}
Y = RNG.normal(size=(64, 1))


@pytest.fixture
def served(served):
    """Splits every embedding by rows."""
    return functools.partial(served, min_table_bytes=0)


def wide_and_deep():
    """Ids are computed in the model, and one of the tables is looked up twice."""
    words = keras.Input((3,), dtype="string", name="words")
    pair = keras.Input((2,), dtype="int64", name="pair")
    ids = keras.layers.StringLookup(vocabulary=WORDS)(words)
    crossed = keras.layers.HashedCrossing(50)((pair[:, :1], pair[:, 1:]))
    item = keras.layers.Embedding(40, 4, embeddings_initializer="glorot_normal", name="item")
    first, second = item(pair[:, 0]), item(pair[:, 1])
    deep = keras.layers.Flatten()(keras.layers.Embedding(31, 4, name="word")(ids))
    x = keras.layers.Concatenate()([deep, first, second, first * second])
    x = keras.layers.Dense(8, activation="relu")(keras.layers.Dropout(0.1)(x))
    wide = keras.layers.Embedding(50, 1, embeddings_initializer=keras.initializers.Constant(np.ones([50, 1])))(crossed)
    return keras.Model([words, pair], keras.layers.Dense(1)(x) + keras.layers.Flatten()(wide))


def made(strategy, make=wide_and_deep, optimizer="adamw", **options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        return tfdist.Trainer(make(), optimizer=keras.optimizers.get(optimizer), loss="mse", seed=1, **options)


def trained(strategy, *args, steps=6, **options):
    trainer = made(strategy, *args, **options)
    trainer.fit(X, Y, batch_size=16, steps=steps, verbose=0)
    return trainer


def values(trainer):
    return [np.asarray(variable.value) for variable in (*trainer.model.variables, *trainer.model.optimizer.variables)]


def are_equal(first, second):
    return [a.tobytes() for a in values(first)] == [b.tobytes() for b in values(second)]


@pytest.mark.parametrize("staleness", ["async", *(pytest.param(each, marks=FULL) for each in ("sync", "bounded(0)"))])
def test_one_worker_gives_the_result_of_one_device_bit_for_bit(staleness, served, single, float64):
    expected, found = trained(single), trained(served(staleness=staleness))
    assert are_equal(found, expected)
    assert found.evaluate((X, Y), batch_size=16) == expected.evaluate((X, Y), batch_size=16)
    np.testing.assert_array_equal(found.model(X), expected.model(X))


def with_ids(ids, rows=40):
    """Returns a function that makes a model of one embedding, of what `ids` returns for the input `pair`."""

    def make():
        words = keras.Input((3,), dtype="string", name="words")
        pair = keras.Input((2,), dtype="int64", name="pair")
        x = keras.layers.Embedding(rows, 4, name="item")(ids(pair))
        return keras.Model([words, pair], keras.layers.Dense(1)(keras.layers.Flatten()(x)))

    return make


def test_a_worker_has_no_copy(served, tmp_path):
    strategy = served()
    trainer = trained(strategy, with_ids(lambda x: x), steps=2)
    kinds = [type(v.value).__name__ for v in (*trainer.model.variables, *trainer.model.optimizer.variables)]
    assert kinds.count("RemoteTable") == 3, "with two slots"
    assert "1 table by rows, exact updates" in strategy.remote.description
    trainer.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(X), trainer.model(X))
    np.testing.assert_array_equal(loaded.optimizer.variables[2], trainer.model.optimizer.variables[2].value)


@pytest.mark.parametrize("to_servers", [False, True], ids=["to one device", "to servers"])
def test_checkpoints_of_other_strategies(to_servers, served, single, float64, tmp_path):
    here, there = (single, served()) if to_servers else (served(), single)
    make = with_ids(lambda x: x)
    first, second = made(here, make), made(there, make)
    first.fit(X, Y, batch_size=16, steps=2, checkpoints=tfdist.Checkpoints(directory=str(tmp_path), every=2), verbose=0)
    second.build((X, Y))
    assert second.resume(str(tmp_path)) == 2
    assert are_equal(second, first)
    first.fit(X, Y, batch_size=16, steps=2, verbose=0)
    second.fit(X, Y, batch_size=16, steps=4, verbose=0)  # counted from the beginning of the resumed run
    assert are_equal(second, first)


def test_lazy_updates_leave_other_rows_alone(served):
    trainer = made(served(sparse_updates="lazy"), with_ids(lambda x: x))
    trainer.build((X, Y))
    table = trainer.model.get_layer("item").weights[0]
    before = np.asarray(table.value)
    trainer.fit(X, Y, batch_size=16, steps=1, shuffle=False, verbose=0)
    changed = np.flatnonzero(np.any(np.asarray(table.value) != before, axis=1))
    assert changed.tolist() == np.unique(X["pair"][:16]).tolist(), "AdamW would decay all rows"


def test_a_table_that_is_frozen_later_is_an_ordinary_weight(served):
    def frozen():
        model = with_ids(lambda x: x)()
        model.get_layer("item").trainable = False
        return model

    trainer = trained(served(), frozen, steps=1)
    assert type(trainer.model.get_layer("item").weights[0].value).__name__ == "ResourceVariable"


def by_rows(pair):
    rows = keras.layers.Embedding(40, 1, name="first")(pair)
    return keras.layers.Lambda(lambda x: keras.ops.cast(keras.ops.abs(x[..., 0]) * 1000, "int64") % 40)(rows)


def tied():
    words = keras.Input((3,), dtype="string", name="words")
    pair = keras.Input((2,), dtype="int64", name="pair")
    item = keras.layers.Embedding(40, 4, name="item")
    x = keras.layers.Lambda(lambda x: keras.ops.matmul(x, keras.ops.transpose(item.embeddings)), (2, 40))(item(pair))
    return keras.Model([words, pair], keras.layers.Dense(1)(keras.layers.Flatten()(x)))


REFUSED = {
    "Lamb": (
        with_ids(lambda x: x),
        {"optimizer": keras.optimizers.Lamb()},
        "an optimizer that updates rows independently: one of Keras's SGD, .* Received: Lamb",
    ),
    "clipnorm": (with_ids(lambda x: x), {"optimizer": keras.optimizers.SGD(clipnorm=1.0)}, "Received: clipnorm"),
    "ids beyond the table": (with_ids(lambda x: x, 20), {}, r"Ids of .* must be in \[0, 20\). Received: [23]\d"),
    "ids from rows": (with_ids(by_rows), {}, "must depend on the batch alone"),
    "tied weights": (tied, {}, "reads all of item/embeddings. Use min_table_bytes=641"),
    "micro-steps": (with_ids(lambda x: x), {"accumulate_steps": 2}, "a single pass over independent rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_tables_do_not_support_is_refused(name, served):
    make, options, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        trained(served(), make, **options)


def test_weights_that_are_kept_for_several_steps_have_no_rows_of_the_next_one(served):
    with pytest.raises(InputError, match="pulled for each step.* Received: .*pull_every"):
        trained(served(staleness="async(pull_every=2)"))
