"""Tests of `tfdist.parameter_server.variable_server`, with the calls of `Servers` over TCP."""

import contextlib
import functools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import OneReplica
from tfdist.config.staleness import Staleness
from tfdist.coordination import calls
from tfdist.coordination.calls import Connection, Message, Service
from tfdist.coordination.job_token import listen
from tfdist.distribution.balanced_parts import place_by_size
from tfdist.errors import PeerLostError
from tfdist.gradients.reducer import tensor_specs
from tfdist.parameter_server.coordinator import Coordinator
from tfdist.parameter_server.pushed_gradients import PushReducer, as_tensor
from tfdist.parameter_server.servers import Servers, placement_of
from tfdist.parameter_server.table_rows import TableSpec
from tfdist.parameter_server.update_order import Update
from tfdist.parameter_server.variable_server import VariableServer

pytestmark = pytest.mark.usefixtures("float64")
RNG = np.random.default_rng(0)
SHAPES = {"dense/kernel": (5, 3), "dense/bias": (3,), "out/kernel": (3, 4)}
WEIGHTS = {path: RNG.normal(size=shape) for path, shape in SHAPES.items()}
GRADIENTS = [[RNG.normal(size=shape) for shape in SHAPES.values()] for _ in range(4)]


@contextlib.contextmanager
def serving(create_server, count, workers, shard_variables="by_size", coordinator=None):
    """Yields servers, and the calls of workers to them; the first server is the coordinator, too, if there is one."""
    servers = [create_server(number) for number in range(count)]
    handlers = [dict(server.handlers) for server in servers]
    handlers[0] |= coordinator.handlers if coordinator else {}
    services = [Service(of_server, "secret", listen("127.0.0.1:0", "")) for of_server in handlers]
    connections = [Connection(f"127.0.0.1:{service.port}", "secret", "server") for service in services]
    try:
        yield servers, [Servers(connections, rank, workers, shard_variables) for rank in range(workers)]
    finally:  # calls that wait then fail
        for end in (*connections, *servers, *services):
            end.close()


@contextlib.contextmanager
def served(count, shard_variables="by_size"):
    """Yields the calls of two workers to servers, and the list to which updates are appended."""
    updates, coordinator = [], Coordinator(2, Staleness())

    def total(server, key, value):
        return float(sum(coordinator.gather(Message({}, [np.array(value)]), key, server, count).arrays))

    def following(version, seconds):
        if len(updates) <= version:
            threading.Event().wait(0.002)
        return updates[version : version + 1]

    def create(number):
        return VariableServer(following, functools.partial(total, number))

    with serving(create, count, 2, shard_variables) as (_, workers):
        for worker in workers:
            worker.place([(path, value.nbytes) for path, value in WEIGHTS.items()], [("state", 8)])
        yield workers, updates


def push(worker, ticket, versions, gradients, before, after, methods=None, ids=()):
    """Pushes gradients, and states before and after the forward pass, without a commit."""
    methods, states = methods or ["none"] * len(gradients), list(zip(before, after, strict=True))
    worker._call_all("push", worker.push_messages(ticket, versions, gradients, states, methods=methods, ids=ids))


def options_of(optimizer, lazy=False, clip_norm=0.0):
    serialized = keras.saving.serialize_keras_object(optimizer)
    numbers = {"epsilon": keras.config.epsilon(), "clip_norm": clip_norm, "clip_value": 0.0}
    return {"lazy": lazy, "optimizer": serialized, "floatx": "float64", **numbers}


def define(worker, optimizer, clip_norm=0.0, constraint=None, excluded=()):
    forms = {number: (path, constraint, path in excluded) for number, path in enumerate(WEIGHTS)}
    worker.define(
        dict(enumerate(WEIGHTS.values())),
        [np.ones([1])],
        forms,
        {},
        **options_of(optimizer, clip_norm=clip_norm),
    )


def by_keras(optimizer, gradients, constraint=None, excluded=()):
    """Returns the weights that Keras's own optimizer computes from these gradients."""
    variables = [keras.Variable(value, name=path.replace("/", "_")) for path, value in WEIGHTS.items()]
    for variable in variables:
        variable.constraint = keras.constraints.deserialize(constraint) if constraint else None
    if excluded:
        names = [path.replace("/", "_") for path in excluded]
        optimizer.exclude_from_weight_decay([v for v in variables if v.name in names])
    for each in gradients:
        optimizer.apply(each, variables)
    return [variable.numpy() for variable in variables]


CASES = {
    "sgd": ({}, lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
    "adamw": ({"excluded": ["dense/bias"]}, lambda: keras.optimizers.AdamW(0.1, weight_decay=0.3)),
    "lamb": ({}, lambda: keras.optimizers.Lamb(0.1)),
    "constrained": (
        {"constraint": keras.constraints.serialize(keras.constraints.MaxNorm(0.5))},
        lambda: keras.optimizers.RMSprop(0.1),
    ),
}


@pytest.mark.parametrize(
    ("servers", "shard_variables"), [(1, "by_size"), (2, "by_size"), (2, "hash"), (3, "round_robin")]
)
@pytest.mark.parametrize("case", CASES)
def test_servers_update_as_keras_does(case, servers, shard_variables):
    options, make = CASES[case]
    with served(servers, shard_variables) as (workers, updates):
        define(workers[0], make(), **options)
        for ticket, gradients in enumerate(GRADIENTS):
            for worker in workers:
                push(worker, ticket, [ticket] * servers, [gradient / 2 for gradient in gradients], [], [])
            updates.append(Update(ticket, ticket, (0, 1)))
            versions, weights, *_ = workers[ticket % 2].pull(ticket + 1)
            assert versions == [ticket + 1] * servers
        fetched = workers[0].fetch(["slot/0/0", "slot/2/0", "optimizer/0"])
    expected = by_keras(make(), GRADIENTS, **options)
    for found, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-13)
    assert fetched["optimizer/0"] == len(GRADIENTS) and fetched["slot/2/0"].shape == (3, 4)


@pytest.mark.parametrize("method", ["topk(ratio=0.5)", "int8"])
def test_servers_add_decoded_shares(method):
    methods, optimizer = [method, "none", method], keras.optimizers.SGD(0.1)
    with served(2) as (workers, updates):
        define(workers[0], optimizer)
        totals = [np.zeros(shape) for shape in SHAPES.values()]
        for rank, (worker, gradients) in enumerate(zip(workers, GRADIENTS, strict=False)):
            reducer = PushReducer(methods, rank)
            tensors = [tf.constant(gradient) for gradient in gradients]
            state = [tf.zeros(state.shape, state.dtype) for state in reducer.state(tensor_specs(tensors))]
            sent = reducer.reduce(tensors, state, OneReplica(), name="gradients").sent
            totals = [total + part.numpy() for total, part in zip(totals, sent, strict=True)]
            push(worker, 0, [0, 0], [payload.numpy() for payload in reducer.payloads], [], [], methods=methods)
        updates.append(Update(0, 0, (0, 1)))
        _, weights, *_ = workers[0].pull(1)
    for found, value in zip(weights, by_keras(keras.optimizers.SGD(0.1), [totals]), strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-6)
    exact = by_keras(keras.optimizers.SGD(0.1), [[a + b for a, b in zip(*GRADIENTS[:2], strict=True)]])
    assert np.max(np.abs(weights[0] - exact[0])) > 1e-5 and np.array_equal(weights[1], exact[1])


@pytest.mark.parametrize("servers", [1, 2])
def test_clipping_is_by_the_norm_over_all_servers(servers):
    with served(servers) as (workers, updates):
        define(workers[0], keras.optimizers.SGD(1.0), clip_norm=0.5)
        push(workers[1], 0, [0] * servers, GRADIENTS[0], [], [])
        updates.append(Update(0, 0, (1,)))
        _, weights, _, found_norm = workers[0].pull(1)
    norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in GRADIENTS[0]))
    assert found_norm == pytest.approx(norm)
    for found, before, gradient in zip(weights, WEIGHTS.values(), GRADIENTS[0], strict=True):
        np.testing.assert_allclose(found, before - gradient * 0.5 / norm, rtol=1e-12)


def test_an_update_of_some_shares_is_scaled_before_clipping_and_takes_the_mean_of_their_states():
    with served(2) as (workers, updates):
        define(workers[0], keras.optimizers.SGD(1.0), clip_norm=0.5)
        for worker, state in zip(workers, (4.0, 8.0), strict=True):
            push(worker, 0, [0, 0], GRADIENTS[0], [np.ones([1])], [np.full([1], state)])
        push(workers[0], 1, [0, 0], GRADIENTS[1], [np.ones([1])], [np.full([1], 3.0)])
        workers[0].discard(1)
        updates.append(Update(0, 0, (0, 1), row_factor=1e-3))
        _, weights, [state], norm = workers[0].pull(1)
        assert state == 6 and norm == pytest.approx(
            2e-3 * np.sqrt(sum(np.sum(np.square(gradient)) for gradient in GRADIENTS[0]))
        )
        for found, before, gradient in zip(weights, WEIGHTS.values(), GRADIENTS[0], strict=True):
            np.testing.assert_allclose(found, before - 2e-3 * gradient, rtol=1e-12)
        updates.append(Update(1, 1, (0,)))
        with pytest.raises(PeerLostError, match="an update has failed"):  # its share was discarded
            workers[0].pull(2)


TABLE = RNG.normal(size=(7, 3))
BIAS = RNG.normal(size=3)
SHARES = [  # for each ticket, the ids and the rows of two workers
    [(np.array(ids, int), RNG.normal(size=(len(ids), 3))) for ids in pair]
    for pair in ([[1, 4, 6], [0, 4]], [[4], [1, 2, 4, 6]], [[], [3]], [[0, 5, 6], [6]])
]


def trained_table(optimizer, servers, lazy):
    """Returns a table and a bias after the updates of `SHARES`."""
    with served(servers) as (workers, updates):
        for worker in workers:
            worker.place([("table", TABLE.nbytes), ("bias", BIAS.nbytes)], [], [0])
        workers[0].define(
            {1: BIAS},
            [],
            {0: ("embedding/embeddings", None, False), 1: ("dense/bias", None, False)},
            {0: TableSpec("embedding/embeddings", TABLE.shape, "float64", None)},
            **options_of(optimizer, lazy),
        )
        workers[0].write_rows("weight/0", np.arange(len(TABLE)), TABLE)
        for ticket, pair in enumerate(SHARES):
            for worker, (ids, rows) in zip(workers, pair, strict=True):
                push(worker, ticket, [ticket] * servers, [rows, BIAS / 2], [], [], ids=[ids])
            updates.append(Update(ticket, ticket, (0, 1)))
        ids = np.array([5, 1, 2])
        _, (rows, bias), *_ = workers[0].pull(len(SHARES), [ids])
        table = workers[1].read_rows("weight/0", np.arange(len(TABLE)))
    np.testing.assert_array_equal(rows, table[ids])
    return table, bias


def table_by_keras(optimizer, lazy):
    """Returns the same by Keras's own optimizer with dense gradients; with `lazy`, other rows keep their values and slots."""
    table, bias = keras.Variable(TABLE, name="table"), keras.Variable(BIAS, name="bias")
    optimizer.build([table, bias])
    kept = [table, *(slot for slot in optimizer.variables if slot.shape == TABLE.shape)]
    for pair in SHARES:
        gradient, before = np.zeros_like(TABLE), [variable.numpy() for variable in kept]
        for ids, rows in pair:
            gradient[ids] += rows
        optimizer.apply([gradient, BIAS], [table, bias])
        others = np.setdiff1d(np.arange(len(TABLE)), np.concatenate([ids for ids, _ in pair]))
        for variable, value in zip(kept, before, strict=True) if lazy else ():
            after = variable.numpy()
            after[others] = value[others]
            variable.assign(after)
    return table.numpy(), bias.numpy()


TABLE_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.3),
}


@pytest.mark.parametrize("lazy", [False, True], ids=["exact", "lazy"])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", TABLE_OPTIMIZERS)
def test_rows_of_tables_are_updated_as_keras_does(name, servers, lazy):
    make = TABLE_OPTIMIZERS[name]
    for found, expected in zip(trained_table(make(), servers, lazy), table_by_keras(make(), lazy), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float64", "int64", ml_dtypes.bfloat16])
def test_a_received_array_of_any_dtype_is_a_tensor(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    assert as_tensor(array).dtype == array.dtype and (as_tensor(array).numpy() == array).all()


def test_messages_have_the_rows_in_use(monkeypatch):
    sizes, encode, ids = [], calls.encode, np.arange(0, 9_000, 9)
    with served(2) as (workers, updates):
        workers[0].place([("table", 10_000 * 64 * 8)], [], [0])
        workers[0].define(
            {},
            [],
            {0: ("embedding/embeddings", None, False)},
            {0: TableSpec("embedding/embeddings", (10_000, 64), "float64", None)},
            **options_of(keras.optimizers.SGD(1.0), lazy=True),
        )
        monkeypatch.setattr(calls, "encode", lambda *message: sizes.extend(map(len, data := encode(*message))) or data)
        _, [rows], *_ = workers[0].pull(0, [ids])
        push(workers[0], 0, [0, 0], [rows + 1], [], [], ids=[ids])
    assert rows.shape == (1_000, 64) and sum(sizes) < 1.05 * 2 * rows.nbytes


def test_states_are_assigned_or_moved_in_the_order_of_updates():
    with served(1) as (workers, updates):
        define(workers[0], keras.optimizers.SGD(1.0))
        for rank, after in ((0, 3.0), (1, 11.0)):  # both computed from version 0, whose state is 1
            push(workers[rank], rank, [0], GRADIENTS[0], [np.ones([1])], [np.array([after])])
        updates += [Update(0, 0, (0,)), Update(1, 1, (1,))]
        states = workers[0].pull(2)[2]
    assert states[0] == [3 + (11 - 1)]


def test_unused_weights_are_left_alone_and_written_ones_are_read():
    with served(2) as (workers, updates):
        define(workers[0], keras.optimizers.AdamW(0.1))
        workers[0].leave_out([1])
        workers[0].write({"weight/0": np.zeros([5, 3]), "slot/2/1": np.full([3, 4], 2.0)}, version=7)
        versions, weights, *_ = workers[1].pull(7)
        assert versions == [7, 7] and not weights[0].any()
        assert (workers[1].fetch(["slot/2/1"])["slot/2/1"] == 2).all()
        updates += [Update(0, 0, (0,))] * 7  # of an earlier range
        push(workers[0], 7, [7, 7], GRADIENTS[0], [], [])
        updates.append(Update(7, 7, (0,)))
        _, after, *_ = workers[1].pull(8)
    assert (after[1] == WEIGHTS["dense/bias"]).all() and (after[0] != 0).all()


def test_pushes_of_many_threads_are_each_applied_once():
    count = 200
    with served(2) as (workers, updates), ThreadPoolExecutor(8) as threads:
        define(workers[0], keras.optimizers.SGD(1.0))
        ones = [np.ones(shape) for shape in SHAPES.values()]

        def push_ones(ticket):
            push(workers[ticket % 2], ticket, [0, 0], ones, [], [])

        list(threads.map(push_ones, range(count)))
        updates += [Update(ticket, ticket, (ticket % 2,)) for ticket in range(count)]
        _, weights, *_ = workers[0].pull(count)
    for found, before in zip(weights, WEIGHTS.values(), strict=True):
        np.testing.assert_allclose(found, before - count, rtol=1e-12)


def test_variables_are_placed_by_size_in_turn_or_by_their_paths():
    sizes = [("a/kernel", 8), ("table", 100), ("a/bias", 8), ("b/kernel", 60), ("b/bias", 50)]
    assert placement_of(sizes, [1], 2) == [1, -1, 1, 0, 1]
    assert placement_of(sizes, [1], 3, "round_robin") == [0, -1, 1, 2, 0]
    by_hash = [0, -1, 1, 1, 0]  # in every process and version
    assert placement_of(sizes, [1], 2, "hash") == by_hash
    assert placement_of(sizes[2:], [], 2, "hash") == by_hash[2:]
    counts = Counter(placement_of([(f"dense_{i}/kernel", 1) for i in range(300)], [], 3, "hash"))
    assert min(counts.values()) > 80
    assert (place_by_size([8, 100, 8, 60, 50], 2), place_by_size([1, 1], 3)) == ([0, 0, 0, 1, 1], [0, 1])
