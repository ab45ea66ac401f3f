"""PowerSGD: comparison with the paper's algorithm in NumPy, and its properties; conformance/ has it on real ranks."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gradients.compression.reducers import named
from tests.gradients.replicas import Runner, bits, initial, on_threads
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.gradients import ErrorFeedback
from tfdist.gradients.compression import create_reducer
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.methods.powersgd import PowerSGD

RANKS = 3
STEPS = 10
SHAPES = [(60, 40), (40,), (3, 3, 8, 16), (16,), (), (0, 5), (30, 50), (50, 3), (4, 3)]
THIN = {0: (60, 40), 2: (72, 16), 6: (30, 50), 7: (50, 3)}  # as matrices


class Paper:
    """Algorithms 1 and 2 of arXiv:1905.13727 for one matrix on W workers, in float64."""

    def __init__(self, q, workers, m):
        self.q = q.astype("float64")
        self.memory = np.zeros((workers, m, len(q)))

    def step(self, gradients):
        """Takes [W, m, n]; returns the mean update."""
        updates = gradients + self.memory
        p = orthogonalize((updates @ self.q).mean(0))
        self.q = (updates.transpose(0, 2, 1) @ p).mean(0)
        update = p @ self.q.T
        self.memory = updates - update
        return update


def orthogonalize(matrix):
    matrix = matrix.copy()
    for i in range(matrix.shape[1]):
        matrix[:, i] /= np.linalg.norm(matrix[:, i])
        for j in range(i + 1, matrix.shape[1]):
            matrix[:, j] -= (matrix[:, i] @ matrix[:, j]) * matrix[:, i]
    return matrix


def given_gradients():
    """Returns gradients [steps][tensors] of shape [ranks, ...]: a common part, and noise."""
    random = np.random.default_rng(0)
    shared = [random.standard_normal(shape) for shape in SHAPES]
    return [[(s + random.standard_normal((RANKS, *s.shape))).astype("float32") for s in shared] for _ in range(STEPS)]


@pytest.fixture(scope="module")
def steps():
    return on_threads(named("powersgd(rank=2)"), given_gradients())[0]


def test_equals_the_paper(steps):
    gradients = given_gradients()
    reducer = PowerSGD(rank=2)
    starts = [s.initial for s in reducer.state([tf.TensorSpec(SHAPES[i], name=f"variable{i}") for i in THIN])]
    papers = {i: Paper(q.T, RANKS, shape[0]) for (i, shape), q in zip(THIN.items(), starts, strict=True)}
    for step, tensors in zip(steps, gradients, strict=True):
        assert len({tuple(bits(state[len(SHAPES) :])) for state in step.state}) == 1
        for i, total in enumerate(step.totals[0]):
            if i not in papers:
                np.testing.assert_allclose(total, tensors[i].sum(0), rtol=1e-5, atol=1e-5)
                continue
            expected = RANKS * papers[i].step(tensors[i].reshape(RANKS, *THIN[i]).astype("float64"))
            norm = np.linalg.norm(expected)
            assert np.linalg.norm(total.reshape(THIN[i]) - expected) <= 1e-5 * norm
            memory = sum(state[i].astype("float64") for state in step.state).reshape(THIN[i])
            assert np.linalg.norm(memory - papers[i].memory.sum(0)) <= 1e-5 * norm


def test_payload(steps):
    exact = 40 + 16 + 1 + 12
    assert steps[0].payload_bytes == 4 * (2 * sum(m + n for m, n in THIN.values()) + exact)


def test_two_messages_whatever_the_buckets():
    """The method packs all factors itself: otherwise each bucket would cost two messages."""
    specs = [tf.TensorSpec([300, 400], tf.float32, f"v{i}") for i in range(5)]
    reducer, recording = (
        create_reducer(specs, "powersgd", small_bytes=1, bucket_bytes=1),
        RecordingCollectives(OneReplica()),
    )
    reduced(reducer, [tf.ones(spec.shape) for spec in specs], collectives=recording)
    assert [call.shapes for call in recording.calls] == [((5 * 4 * 300,),), ((5 * 4 * 400,),)]


def reduced(reducer, tensors, state=None, collectives=None):
    tensors = [tf.constant(x) for x in tensors]
    state = initial(reducer, tensors) if state is None else state
    return reducer.reduce(tensors, state, collectives or OneReplica(), name="g")


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 12), max_size=4),
    st.integers(1, 5),
    st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 3e4, 1e30]),
)
def test_any_shape_and_size(shape, rank, dtype, scale):
    dtype = tf.as_dtype(dtype)
    scale = min(scale, 1e3) if dtype == tf.float16 else scale
    x = tf.cast(tf.constant(np.random.default_rng(0).standard_normal(shape) * scale), dtype)
    recording, reducer = RecordingCollectives(OneReplica()), PowerSGD(rank=rank)
    [total], [sent], _, witnesses = reduced(reducer, [x], collectives=recording)
    assert (total.shape, total.dtype) == (x.shape, dtype)
    assert all(tf.reduce_all(tf.math.is_finite(w)) for w in witnesses)
    assert tf.reduce_all(tf.equal(total, sent))
    assert not reducer.is_exact(x) or tf.reduce_all(tf.equal(total, x))
    wide = tf.cast(x, tf.float64).numpy(), tf.cast(total, tf.float64).numpy()
    assert np.linalg.norm(wide[0] - wide[1]) <= 1.01 * np.linalg.norm(wide[0]), "a projection"
    assert recording.payload_bytes <= x.shape.num_elements() * dtype.size


def test_low_rank_is_sent_whole():
    """A matrix of rank 2 is sent exactly, even if not all columns are needed."""
    random = np.random.default_rng(0)
    x = (random.standard_normal((50, 2)) @ random.standard_normal((2, 70))).astype("float32")
    for rank in (2, 4):
        np.testing.assert_allclose(reduced(PowerSGD(rank=rank), [x]).totals[0], x, atol=1e-4)


@pytest.mark.parametrize("start", [np.zeros((30, 40)), np.ones((30, 40))], ids=["zeros", "rank one"])
def test_recovers_from_matrices_that_need_no_columns(start):
    """Columns that were not needed are restored afterwards: a matrix of rank 4 is sent exactly."""
    random = np.random.default_rng(0)
    x = (random.standard_normal((30, 4)) @ random.standard_normal((4, 40))).astype("float32")
    reducer, state = PowerSGD(rank=4), None
    for _ in range(3):
        [total], _, state, _ = reduced(reducer, [start.astype("float32")], state)
        np.testing.assert_allclose(total, start, atol=1e-5)
    np.testing.assert_allclose(reduced(reducer, [x], state).totals[0], x, atol=1e-3)


def test_warm_start_turns_to_the_strongest_directions():
    random = np.random.default_rng(0)
    u, s, v = np.linalg.svd(random.standard_normal((40, 60)), full_matrices=False)
    x = (u * s * 0.8 ** np.arange(40) @ v).astype("float32")
    best = np.sqrt(np.sum((s * 0.8 ** np.arange(40))[4:] ** 2))

    reducer, state, errors = PowerSGD(rank=4), None, []
    for _ in range(30):
        [total], _, state, _ = reduced(reducer, [x], state)
        errors.append(np.linalg.norm(x - total))
    assert errors[-1] <= 1.001 * best < 1.05 * best < errors[0]


def test_replicas_make_the_totals_of_one(mirrored4):
    """The method is linear: four replicas give the same totals as one with the sum of their gradients."""
    gradients = np.random.default_rng(0).standard_normal((5, 4, 30, 20))
    reducer = ErrorFeedback(PowerSGD(rank=3))
    steps = Runner(mirrored4, reducer, [gradients[0]]).steps([[step] for step in gradients])
    state = initial(reducer, [tf.zeros([30, 20], tf.float64)])
    for step, gradient in zip(steps, gradients, strict=True):
        alone = reducer.reduce([tf.constant(gradient.sum(0))], state, OneReplica(), name="gradients")
        state = alone.state
        np.testing.assert_allclose(step.totals[0][0], alone.totals[0], rtol=1e-9, atol=1e-9)


def test_replicas_forget_their_differences(mirrored4):
    """The state of replicas stays bounded although their gradients always differ by the same amount."""
    random = np.random.default_rng(0)
    shared, own = random.standard_normal((20, 30)), random.standard_normal((4, 20, 30))
    gradient = (shared + own - own.mean(0)).astype("float32")
    steps = Runner(mirrored4, ErrorFeedback(PowerSGD(rank=4)), [gradient]).steps([[gradient]] * 60)
    norms = [np.linalg.norm(step.state[0][0]) for step in steps]
    assert max(norms[30:]) < 1.5 * max(norms[:30])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (12, 7), (29, 19)])
def test_witness_even_where_q_is_zero(bad, place):
    x = np.zeros((30, 20), "float32")
    x[place] = bad
    for q in (np.zeros((2, 20)), np.eye(2, 20)):
        witnesses = reduced(PowerSGD(rank=2), [x], [tf.constant(q, tf.float32)]).witnesses
        assert not np.isfinite(witnesses[0]).all()


class Halves(Codec):
    """A biased codec that leaves out every other element."""

    biased = True
    compiles = False

    def encode(self, x, seed):
        return [x[::2]]

    def decode(self, code, size):
        return tf.reshape(tf.stack([code[0], tf.zeros_like(code[0])], axis=1), [-1])[:size]


def test_then_codes_the_factors(mirrored4):
    same = [np.random.default_rng(0).standard_normal((4, *shape)).astype("float32") for shape in ((30, 20), (7,))]
    run = Runner(mirrored4, ErrorFeedback(PowerSGD(rank=2).then(Halves())), same)
    steps = run.steps([same] * 3)
    assert steps[0].payload_bytes == 4 * (-(-(2 * 30 + 7) // 2) + 1) + 4 * (20 + 1)
    for i, gradients in enumerate(same):
        sent = sum(step.totals[0][i] for step in steps)
        kept = sum(state[i] for state in steps[-1].state)
        np.testing.assert_allclose(sent + kept, 3 * gradients.sum(0), rtol=1e-4, atol=1e-4)
        for step in steps:
            assert len({totals[i].tobytes() for totals in step.totals}) == 1
