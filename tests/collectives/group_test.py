"""Groups of replicas and messages between two of them, on the devices of one process."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import collectives
from tfdist.collectives import NoCommunication, OneReplica, RecordedCall, RecordingCollectives
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError

VALUES = np.random.default_rng(0).standard_normal((4, 8, 3)).astype("float32")
PAIRS = [[0, 1], [2, 3]]
GROUPS = {2: [[0, 1]], 3: [[0, 2], [1]], 4: PAIRS}  # all; of unequal sizes; side by side


@pytest.fixture(scope="module")
def mirrored3() -> Strategy:
    """A strategy with three replicas in this process."""
    return tfdist.load_strategy("mirrored", devices=3, environment={})


@pytest.fixture(params=["mirrored2", "mirrored3", "mirrored4"])
def several(request) -> Strategy:
    """Strategies with two, three and four replicas."""
    return request.getfixturevalue(request.param)


def mine(collectives):
    return tf.gather(tf.constant(VALUES), collectives.rank)


def own(groups, collectives):
    """Returns the ranks of the calling replica's group."""
    return next(ranks for ranks in groups if collectives.static_rank in ranks)


def test_every_operation_of_a_group(several, run):
    groups = GROUPS[several.replicas]

    def operations(c):
        group = c.group(own(groups, c))
        x = mine(c)
        return {
            "sum": group.all_reduce([x, x[0, 0]], name="sum"),
            "max": group.all_reduce([x], "max", name="max"),
            "gather": group.all_gather([x[: 1 + c.rank]], name="gather"),
            "scatter": group.reduce_scatter([x], "mean", name="scatter"),
            "exchange": group.all_to_all([x], name="exchange"),
            "root": group.broadcast([x], len(own(groups, c)) - 1, name="root"),
            "barrier": group.barrier(name="barrier"),
            "rank": tf.identity(group.rank),
        }

    for rank, found in enumerate(run(several, operations)):
        ranks = next(ranks for ranks in groups if rank in ranks)
        place, n = ranks.index(rank), len(ranks)
        x = VALUES[ranks]
        share = slice(place * 8 // n, (place + 1) * 8 // n)
        assert found["rank"] == place
        np.testing.assert_allclose(found["sum"][0], x.sum(0), rtol=1e-6)
        np.testing.assert_allclose(found["sum"][1], x[:, 0, 0].sum(), rtol=1e-6)
        np.testing.assert_array_equal(found["max"][0], x.max(0))
        np.testing.assert_array_equal(found["gather"][0], np.concatenate([VALUES[r, : 1 + r] for r in ranks]))
        np.testing.assert_allclose(found["scatter"][0], x.mean(0)[share], rtol=1e-5)
        np.testing.assert_array_equal(found["exchange"][0], np.concatenate([VALUES[r, share] for r in ranks]))
        np.testing.assert_array_equal(found["root"][0], x[-1])


def test_replicas_outside_of_a_group_make_no_call(mirrored4, compiled):
    """A group of a group, of ranks 2 and 3; in a graph, other replicas need not wait for it."""

    def total(c):
        x = mine(c)
        if c.static_rank == 0:
            return x
        outer = c.group([1, 2, 3])
        return x if outer.static_rank == 0 else outer.group([1, 2]).all_reduce([x], name="sum")[0]

    found = compiled(mirrored4, total)
    for rank in (0, 1):
        np.testing.assert_array_equal(found[rank], VALUES[rank])
    for rank in (2, 3):
        np.testing.assert_array_equal(found[rank], VALUES[2] + VALUES[3])


@pytest.mark.parametrize("step", [1, -1])
def test_a_ring_of_messages(several, run, step):
    """Each rank receives before it sends, except eagerly, where replicas run one after another."""
    n = several.replicas

    def exchange(c):
        rank, x = c.static_rank, mine(c)
        to, source = (rank + step) % n, (rank - step) % n
        specs = [tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec([], tf.int32)]
        if tf.executing_eagerly():
            c.send([x, c.rank], to, tag="ring")
            return c.receive(specs, source, tag="ring")
        received = c.receive(specs, source, tag="ring")
        c.send([x, c.rank], to, tag="ring")
        return received

    for rank, (x, sender) in enumerate(run(several, exchange)):
        assert sender == (rank - step) % n
        np.testing.assert_array_equal(x, VALUES[(rank - step) % n])


def test_messages_in_a_loop(several, compiled):
    n = several.replicas

    def travel(c):
        rank = c.static_rank

        def turn(i, x):
            c.send([x], (rank + 1) % n, tag="turn")
            [y] = c.receive([tf.TensorSpec([8, 3], tf.float32)], (rank - 1) % n, tag="turn")
            return i + 1, y

        return tf.while_loop(lambda i, x: i < 5, turn, (tf.constant(0), mine(c)))[1]

    for rank, x in enumerate(compiled(several, travel)):
        np.testing.assert_array_equal(x, VALUES[(rank - 5) % n])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8", "bool"])
def test_messages_of_equal_values_are_not_merged(mirrored2, compiled, dtype):
    """Two constants of equal values, of which one is not used: the sender's call must not wait for it."""

    def exchange(c):
        x = tf.zeros([3], dtype)
        spec = [tf.TensorSpec([3], dtype)]
        if c.static_rank == 0:
            c.send([x], 1, tag="a")
            c.send([x], 1, tag="b")
            return x
        c.receive(spec, 0, tag="b")
        return c.receive(spec, 0, tag="a")[0]

    for found in compiled(mirrored2, exchange):
        assert not found.any()


def differentiated(call):
    """Returns a replica's gradient of the sum of (rank + 1) * call(group, x), on the group of the ranks 0 and 1."""

    def step(c):
        group, x = c.group([0, 1]), mine(c)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = (c.static_rank + 1) * tf.reduce_sum(call(group, x))
        return tape.gradient(loss, x)

    return step


@pytest.mark.parametrize(
    "call",
    [lambda c, x: collectives.all_reduce(c, x, name="sum"), lambda c, x: collectives.all_gather(c, x, name="gather")],
    ids=["all_reduce", "all_gather"],
)
def test_gradients_cross_the_replicas_of_a_group(mirrored2, run, call):
    for gradient in run(mirrored2, differentiated(call)):
        np.testing.assert_array_equal(gradient, np.full([8, 3], 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda c, x: c.all_reduce([x], name="sum"),
        lambda c, x: c.all_reduce([x], "mean", name="mean"),
        lambda c, x: c.all_gather([x], name="gather"),
        lambda c, x: c.reduce_scatter([x], name="scatter"),
        lambda c, x: c.all_to_all([x], name="exchange"),
        lambda c, x: c.broadcast([x], name="root"),
    ],
    ids=["sum", "mean", "gather", "scatter", "exchange", "root"],
)
def test_gradients_of_one_replica_are_refused(mirrored2, run, call):
    with pytest.raises(LookupError, match=r"is not differentiable. Call tfdist.collectives.all_reduce"):
        run(mirrored2, differentiated(lambda c, x: call(c, x)[0]))


class Without(OneReplica):
    """An engine without groups, such as that of tfdist.horovod without Horovod, or one of a third party."""

    size = 2


class Shared(Without):
    """A trace that replicas share, as on a TPU."""

    @property
    def rank(self):
        return tf.compat.v1.placeholder_with_default(0, [])


BYTE = [tf.TensorSpec([1], tf.int8)]
WITHOUT = "mirrored, multiworker and horovod have groups and messages. Received: a "
SHARED = "a trace for each replica. Received: a trace that all"


@pytest.mark.parametrize(
    ("engine", "call", "rule"),
    [
        (None, lambda c: c.group([0, 0, 1]), r"ranks from 0 to 1, in ascending order. Received: \[0, 0, 1\]"),
        (None, lambda c: c.group([0, 2]), r"ranks from 0 to 1, in ascending order. Received: \[0, 2\]"),
        (None, lambda c: c.group([1]), r"must belong to the group .* Received: \[1\] on rank 0"),
        (None, lambda c: c.send([tf.zeros([1])], 2, tag="x"), "Received: rank 2 on rank 0 of 2"),
        (
            None,
            lambda c: c.receive([tf.TensorSpec([None], tf.float32)], 1, tag="x"),
            "static shapes. Received: .* in x",
        ),
        (
            OneReplica,
            lambda c: c.send([tf.zeros([1])], 0, tag="x"),
            "another rank of the group. Received: rank 0 on rank 0 of 1",
        ),
        (None, lambda c: c.group([1, 0]), r"in ascending order. Received: \[1, 0\]"),
        (Without, lambda c: c.group([0]), WITHOUT),
        (Without, lambda c: c.send([tf.zeros([1])], 1, tag="x"), WITHOUT),
        (Without, lambda c: c.receive(BYTE, 1, tag="x"), WITHOUT),
        (Shared, lambda c: c.group([0]), SHARED),
        (Shared, lambda c: c.send([tf.zeros([1])], 1, tag="x"), SHARED),
    ],
)
def test_groups_and_messages_that_cannot_be(mirrored2, engine, call, rule):
    with pytest.raises(InputError, match=rule):
        if engine is None:
            mirrored2.run(lambda: call(mirrored2.collectives) and tf.zeros([]))
        else:
            with tf.Graph().as_default():
                call(engine())


def test_the_group_of_all():
    alone = OneReplica()
    assert alone.group([0]) is alone and alone.static_rank == 0
    assert Without().group([0, 1]).size == 2


def test_recording_of_groups(mirrored4):
    recording = RecordingCollectives(mirrored4.collectives)

    def step():
        group, x = recording.group(own(PAIRS, recording)), tf.zeros([5])
        group.all_reduce([x], name="sum")
        other = 1 - group.static_rank
        group.group([0, 1]).send([x], other, tag="m")
        group.receive([tf.TensorSpec([5], tf.float32)], other, tag="m")
        recording.all_gather([x], name="all")
        return x

    mirrored4.run(step)
    calls = [call for call in recording.calls if call.ranks is None or 2 in call.ranks]
    kinds = ((tf.float32,), ((5,),))
    assert set(calls) == {
        RecordedCall("all_reduce", "sum", *kinds, (2, 3)),
        RecordedCall("send", "m", *kinds, (2, 3)),
        RecordedCall("send", "m", *kinds, (3, 2)),
        RecordedCall("receive", "m", *kinds, (2, 3)),
        RecordedCall("receive", "m", *kinds, (3, 2)),
        RecordedCall("all_gather", "all", *kinds),
    }
    assert recording.payload_bytes == 4 * 3 * 20


def test_without_communication(mirrored4, compiled):
    def step(c):
        group = NoCommunication(c).group(own(PAIRS, c))
        group.send([tf.zeros([2])], 1 - group.static_rank, tag="m")
        [received] = group.receive([tf.TensorSpec([2], tf.int8)], 1 - group.static_rank, tag="m")
        return received, group.all_gather([tf.zeros([2])], name="gather")[0]

    for received, gathered in compiled(mirrored4, step):
        assert received.dtype == np.int8 and received.shape == (2,) and gathered.shape == (4,)


def test_eager_calls_that_replicas_do_not_make_together(mirrored2):
    def receive():
        other = 1 - mirrored2.collectives.static_rank
        return mirrored2.collectives.receive([tf.TensorSpec([1], tf.float32)], other, tag="never")[0]

    with pytest.raises(
        RuntimeError, match="must make the same calls at the same time. Received: message/never on rank 0"
    ):
        mirrored2.run(receive)
