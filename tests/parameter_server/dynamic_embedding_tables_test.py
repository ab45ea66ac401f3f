"""Tests of `tfdist.parameter_server.dynamic_embedding_tables`: on servers in threads, and of one table by itself."""

from collections import Counter

import keras
import numpy as np
import pytest

from tests.parameter_server.variable_server_test import BIAS, options_of, push, served
from tfdist.parameter_server.dynamic_embedding_tables import KeyedRows, initial_rows, rows_initializer
from tfdist.parameter_server.embedding_tables import RemoteKeyedTable
from tfdist.parameter_server.table_rows import TableSpec, split
from tfdist.parameter_server.update_order import Update

pytestmark = pytest.mark.usefixtures("float64")
RNG = np.random.default_rng(0)
WIDTH = 3
INITIAL = rows_initializer(keras.initializers.RandomUniform(seed=7))
KEYS = np.array([-(2**63), -5, 0, 3, 6, 9, 12, 15, 18, 10**12, 2**62, 2**63 - 1])
UPDATES = [  # for each update, the keys and the gradients of two workers
    [(np.sort(keys), RNG.normal(size=(len(keys), WIDTH))) for keys in pair]
    for pair in ([RNG.choice(KEYS[: 4 + i % 9], 1 + i % 3, replace=False) for _ in range(2)] for i in range(25))
]
ADAM = {"beta_1": 0.875, "beta_2": 0.9375, "epsilon": 2.0**-20}  # exact in float32, to which Keras rounds them
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.125, momentum=0.875),
    "adamw": lambda: keras.optimizers.AdamW(0.125, weight_decay=0.25, **ADAM),
    "adagrad": lambda: keras.optimizers.Adagrad(0.125, initial_accumulator_value=0.5, epsilon=2.0**-20),
}


def table_spec(admit_after=1, evict_after=0, initializer=INITIAL):
    return TableSpec("item/embeddings", (1, WIDTH), "float64", initializer, (admit_after, evict_after))


def initial(key):
    return initial_rows(INITIAL, np.array([key]), WIDTH, "float64")[0]


def expected_rows(name, admit_after, evict_after):
    """Returns the rows after `UPDATES`, computed key by key with the formulas of the papers."""
    counts, last_use, rows, slots = Counter(), {}, {}, {}
    for update, pair in enumerate(UPDATES, 1):
        gradients = {}
        for keys, values in pair:
            for key, value in zip(keys.tolist(), values, strict=True):
                gradients[key] = gradients.get(key, 0) + value
        for key, gradient in gradients.items():
            counts[key] += 1
            last_use[key] = update
            if counts[key] < admit_after:
                continue
            row, (a, b) = rows.get(key, initial(key)), slots.get(key, (0.5, 0) if name == "adagrad" else (0, 0))
            if name == "sgd":
                a = 0.875 * a - 0.125 * gradient
                row = row + a
            elif name == "adagrad":
                a = a + gradient**2
                row = row - 0.125 * gradient / np.sqrt(a + 2.0**-20)
            else:
                row = row * (1 - 0.125 * 0.25)
                a, b = 0.875 * a + 0.125 * gradient, 0.9375 * b + 0.0625 * gradient**2
                rate = 0.125 * np.sqrt(1 - 0.9375**update) / (1 - 0.875**update)
                row = row - rate * a / (np.sqrt(b) + 2.0**-20)
            rows[key], slots[key] = row, (a, b)
        if evict_after and update % evict_after == 0:
            for key in [key for key, last in last_use.items() if last <= update - evict_after]:
                for values in (counts, last_use, rows, slots):
                    values.pop(key, None)
    return rows


def defined(workers, optimizer, *rule):
    """Creates a table and a bias on the servers; returns access to the table."""
    for worker in workers:
        worker.place([("table", 24), ("bias", BIAS.nbytes)], [], [0], [0])
    forms = {0: ("item/embeddings", None, False), 1: ("dense/bias", None, False)}
    workers[0].define({1: BIAS}, [], forms, {0: table_spec(*rule)}, **options_of(optimizer))
    return RemoteKeyedTable(0, KeyedRows(table_spec(*rule)), workers[0], is_chief=True)


def train(workers, updates, tickets):
    for ticket in tickets:
        for worker, (keys, rows) in zip(workers, UPDATES[ticket], strict=True):
            push(worker, ticket, [ticket] * worker.count, [rows, BIAS / 2], [], [], ids=[keys])
        updates.append(Update(ticket, ticket, (0, 1)))
        workers[0].pull(ticket + 1)


@pytest.mark.parametrize("rule", [(1, 0), (2, 4), (3, 8)])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_admitted_trained_and_evicted_by_the_order_of_updates(name, servers, rule):
    with served(servers) as (workers, updates):
        table = defined(workers, OPTIMIZERS[name](), *rule)
        train(workers, updates, range(len(UPDATES)))
        arrays = table.export()
    expected = expected_rows(name, *rule)
    assert arrays["keys"][:, 0].tolist() == sorted(expected) and arrays["updates"] == len(UPDATES)
    assert rule == (1, 0) or len(expected) < len(KEYS)
    np.testing.assert_allclose(arrays["rows_0"], [expected[key] for key in sorted(expected)], rtol=1e-12)


def test_a_pull_counts_nothing_and_shows_an_admitted_key_its_initial_row():
    with served(2) as (workers, updates):
        table = defined(workers, OPTIMIZERS["sgd"](), 2)
        keys = np.union1d(*(keys for keys, _ in UPDATES[0]))
        before, after = [], []
        for _ in range(3):
            before.append(workers[1].pull(0, [keys])[1][0])
        train(workers, updates, range(1))
        for _ in range(3):
            after.append(workers[1].pull(1, [keys])[1][0])
        assert not np.any(before), "the first occurrence does not admit a key"
        np.testing.assert_array_equal(after, [[initial(key) for key in keys]] * 3)
        assert not np.any(table.read_rows(keys)), "no key has a row"
        assert len(table.export()["keys"]) == 0 and len(table.export()["candidates"]) == len(keys)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_rows_slots_and_counts_move_to_another_number_of_servers(before, after):
    results = []
    with served(before) as (workers, updates):
        table = defined(workers, OPTIMIZERS["adamw"](), 3, 7)
        train(workers, updates, range(8))
        arrays = table.export()
        train(workers, updates, range(8, len(UPDATES)))
        results.append(table.export())
    with served(after) as (workers, updates):
        table = defined(workers, OPTIMIZERS["adamw"](), 3, 7)
        table.restore(arrays)
        workers[0].write({"optimizer/0": np.array(8)}, version=8)
        updates += [Update(0, 0, (0,))] * 8  # of an earlier range
        train(workers, updates, range(8, len(UPDATES)))
        results.append(table.export())
    assert results[0].keys() == results[1].keys() and len(results[0]["candidates"])
    for name in results[0]:
        np.testing.assert_array_equal(results[0][name], results[1][name])


def test_memory_is_that_of_the_keys_in_use():
    table = KeyedRows(table_spec(1, 4))
    table.set_slots([keras.Variable(np.full((1, WIDTH), 0.5))])
    for update in range(200):
        keys = np.array([-1, *range(10 * update, 10 * update + 10)])
        with table.updating(keras.ops.convert_to_tensor(keys), keras.ops.ones((11, WIDTH))) as gradient:
            table.variable.value.assign_sub(gradient)
    rows, candidates, evicted = table.usage()
    assert (rows, candidates, evicted) == (41, 0, 2000 - 40)
    assert all(len(each.numpy()) <= 2 * 81 for each in table.tables), "at most 81 rows at a time"
    np.testing.assert_allclose(table.read_rows(np.array([-1, 1995])), [initial(-1) - 200, initial(1995) - 1])
    assert np.all(table.read_rows(np.array([-1, 5, 1995]), 1) == 0.5), "a row that is used again has new slots"


@pytest.mark.parametrize(
    ("initializer", "mean", "stddev"),
    [
        (keras.initializers.RandomUniform(-1.0, 3.0, seed=4), 1.0, 4 / 12**0.5),
        (keras.initializers.RandomNormal(0.5, 2.0, seed=4), 0.5, 2.0),
        (keras.initializers.Constant(0.25), 0.25, 0.0),
        (keras.initializers.Zeros(), 0.0, 0.0),
    ],
)
def test_initial_rows_depend_on_seed_and_key_only(initializer, mean, stddev):
    config, keys = rows_initializer(initializer), np.arange(-5000, 5000) * 64
    rows = initial_rows(config, keys, 4, "float64")
    order = RNG.permutation(len(keys))[:100]
    np.testing.assert_array_equal(initial_rows(config, keys[order], 4, "float64"), rows[order])
    assert np.mean(rows) == pytest.approx(mean, abs=0.03) and np.std(rows) == pytest.approx(stddev, rel=0.02)
    if stddev:
        assert len(np.unique(rows)) == rows.size and np.abs(np.corrcoef(rows.T) - np.eye(4)).max() < 0.05
        assert not np.any(initial_rows({**config, "seed": 5}, keys, 4, "float64") == rows)


def test_keys_with_a_pattern_are_spread_over_servers():
    keys = np.arange(-3000, 3000) * 12
    places, ids = zip(*split(keys, 3, True), strict=True)
    assert sorted(np.concatenate(places)) == list(range(len(keys))) and min(map(len, places)) > 1900
    for own, own_ids in zip(places, ids, strict=True):
        np.testing.assert_array_equal(keys[own], own_ids)
