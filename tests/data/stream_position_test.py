"""Positions in the stream of examples, compared with counting; its order; batch sizes with other numbers of replicas."""

import dataclasses
import json

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.data import StreamPosition, source, steps_in_epochs
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.errors import InputError

SETTINGS = hypothesis.settings(derandomize=True, max_examples=300)
STEPS = 40


@st.composite
def runs(draw):
    """Draws the size of an epoch, and the batch size of each step, which changes a few times."""
    parts = draw(st.lists(st.tuples(st.integers(1, 13), st.integers(1, 9)), min_size=1, max_size=4))
    batches = [batch for batch, steps in parts for _ in range(steps)]
    return draw(st.integers(1, 30)), batches + [batches[-1]] * STEPS


def positions(batches):
    """Returns the position of each step, computed as in a run."""
    found = [StreamPosition(batches[0])]
    for step, batch in enumerate(batches[1:], 1):
        found.append(found[-1].with_batch_size(step, batch))
    return found


@hypothesis.given(run=runs())
@SETTINGS
def test_where_each_step_begins(run):
    size, batches = run
    for step, position in enumerate(positions(batches)):
        assert position.examples_before(step) == sum(batches[:step])
        assert position.epoch(step, size) == sum(batches[:step]) // size
        assert position.batch_size == batches[step]


@hypothesis.given(run=runs(), now=st.integers(0, STEPS - 1), more=st.integers(1, 30))
@SETTINGS
def test_how_many_steps_examples_take(run, now, more):
    """From any step, with all later batches of its position's batch size."""
    _, batches = run
    position = positions(batches)[now]
    wanted = position.examples_before(now) + more
    used, steps = position.examples_before(now), now
    while used < wanted:
        used, steps = used + position.batch_size, steps + 1
    assert position.steps_for(wanted) == steps
    assert position.steps_for(position.examples_before(now)) == now


@hypothesis.given(run=runs())
@SETTINGS
def test_an_epoch_ends_in_the_step_that_uses_its_last_example(run):
    size, batches = run
    stream = [(step, example) for step, batch in enumerate(batches) for example in range(batch)]
    for step, position in enumerate(positions(batches)[: len(batches) - STEPS]):
        epoch = position.epoch(step, size)
        last = position.end_of_epoch(epoch, size) - 1
        if all(batch == batches[step] for batch in batches[step : last + 1]):
            assert stream[(epoch + 1) * size - 1][0] == last


@hypothesis.given(run=runs())
@SETTINGS
def test_epochs_are_counted_from_an_epochs_end_or_from_the_step(run):
    size, batches = run
    used, ended = 0, 0
    for step, batch in enumerate(batches):
        last = batches[step - 1]
        before = StreamPosition(last, step - 1, used - last) if step else StreamPosition(batch)
        assert before.epochs_from(step, size) == (ended if step and ended > used - last else used)
        used += batch
        ended = used - used % size


@hypothesis.given(size=st.integers(1, 50), batch_size=st.integers(1, 60), epochs=st.integers(0, 9))
@SETTINGS
def test_a_batch_that_never_changes(size, batch_size, epochs):
    position = StreamPosition(batch_size)
    assert position.with_batch_size(7, batch_size) is position
    assert position.examples_before(5) == 5 * batch_size
    assert position.steps_for(epochs * size) == steps_in_epochs(epochs, size, batch_size)
    assert position.end_of_epoch(epochs, size) == steps_in_epochs(epochs + 1, size, batch_size)


BEGUN = BatchSchedule.initial(StreamPosition(12), 0, 40, batch_size=12, replicas=3)


def test_the_batch_of_one_replica_stays():
    fewer = BEGUN.from_step(2, 3, 12, "replica")
    assert (fewer.position, fewer.learning_rate_factor) == (StreamPosition(8, step=3, examples=36), 2 / 3)
    more = fewer.from_step(5, 5, 12, "replica")
    assert (more.position, more.learning_rate_factor) == (StreamPosition(20, step=5, examples=52), 5 / 3)
    back = more.from_step(3, 6, 12, "replica")
    assert (back.position, back.learning_rate_factor) == (StreamPosition(12, step=6, examples=72), 1)


def test_a_person_is_told_and_it_comes_back_from_a_checkpoint():
    batch_schedule = BEGUN.from_step(2, 3, 12, "replica")
    assert BatchSchedule.from_json(json.loads(json.dumps(batch_schedule.to_json()))) == batch_schedule
    assert str(batch_schedule) == (
        "A batch has 8 examples: the run began with 12 on 3 replicas, and keeps the batch size per replica. The "
        "learning rate is multiplied by 0.666667."
    )


def test_the_global_batch_stays():
    for replicas in (2, 5, 12):
        assert BEGUN.from_step(replicas, 3, 12, "global") == BEGUN


def test_a_global_batch_of_ones_own_is_a_new_beginning():
    other = BEGUN.from_step(2, 3, 10, "global")
    assert (other.position, other.batch_size) == (StreamPosition(10, 3, 36), 10)
    assert (other.replicas, other.learning_rate_factor) == (2, 1)


def test_one_may_follow_on_the_other():
    fewer = BEGUN.from_step(2, 3, 12, "global").from_step(2, 5, 12, "replica")
    assert (fewer.position, fewer.learning_rate_factor) == (StreamPosition(8, 5, 60), 2 / 3)
    assert fewer.from_step(2, 6, 12, "global").position == StreamPosition(12, 6, 68)


def test_epochs_end_where_their_examples_do():
    fewer = BEGUN.from_step(2, 3, 12, "replica")
    assert BEGUN.end(0, 2, 40) == 7
    assert fewer.end(0, 2, 40) == 3 + -(-(80 - 36) // 8)
    assert fewer.end(7, 0, 40) == 7


@pytest.mark.parametrize(
    ("batch_schedule", "batch_size", "elastic_batch", "said"),
    [
        (BEGUN, 8, "replica", "--batch_size=8 in a run that began with 12 on 3 replicas"),
        (BEGUN, 12, "each", "--elastic_batch must be global or replica. Received: 'each'"),
        (
            dataclasses.replace(BEGUN, batch_size=13),
            13,
            "replica",
            "Received: --batch_size=13 and 3 replicas. Use 12 or 15, or --elastic_batch=global.",
        ),
        (dataclasses.replace(BEGUN, batch_size=2), 2, "replica", "Use 3, or --elastic_batch=global."),
    ],
)
def test_what_is_refused(batch_schedule, batch_size, elastic_batch, said):
    with pytest.raises(InputError) as error:
        batch_schedule.from_step(2, 3, batch_size, elastic_batch)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


GOLDEN = [[6, 9, 5, 4, 7, 3, 0, 2, 1, 8], [6, 3, 8, 9, 5, 0, 7, 1, 4, 2]]


def epoch(number: int, size: int, seed: int = 0) -> np.ndarray:
    return source.indices(tf.range(number * size, (number + 1) * size, dtype=tf.int64), size, seed).numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16, 17, 100, 1797])
@pytest.mark.parametrize("number", [0, 1, 1000])
def test_each_epoch_is_a_permutation(size, number):
    np.testing.assert_array_equal(np.sort(epoch(number, size)), np.arange(size))


@hypothesis.given(
    size=st.integers(1, 20), start=st.integers(0, 100), count=st.integers(1, 70), seed=st.integers(-(2**63), 2**64)
)
@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
def test_positions_are_independent_of_what_is_asked_with_them(size, start, count, seed):
    together = source.indices(tf.range(start, start + count, dtype=tf.int64), size, seed).numpy()
    for place in {0, count // 2, count - 1}:
        alone = source.indices(tf.constant([start + place], tf.int64), size, seed).numpy()
        assert alone == together[place : place + 1]


def test_order_is_the_same_in_every_process_and_version():
    # Golden values: if they change, runs saved by earlier versions no longer resume correctly.
    np.testing.assert_array_equal(epoch(0, 10, seed=7), GOLDEN[0])
    np.testing.assert_array_equal(epoch(1, 10, seed=7), GOLDEN[1])


def dependence(a: np.ndarray, b: np.ndarray, size: int) -> float:
    """Returns how far pairs of examples are from independence, in standard deviations of chi-square."""
    counts = np.bincount(a * 16 // size * 16 + b * 16 // size, minlength=256)
    return (np.sum((counts - len(a) / 256) ** 2) / (len(a) / 256) - 255) / np.sqrt(510)


@pytest.mark.parametrize("size", [60000, 2**24])
def test_neighbours_epochs_and_seeds_are_independent(size):
    # With 4 rounds of the cipher this is 40 to 4000; with 8, it is 44 at 2**24.
    def part(epoch_number, seed):
        start = epoch_number * size
        return source.indices(tf.range(start, start + min(size, 2**20), dtype=tf.int64), size, seed).numpy()

    first = part(0, 5)
    for lag in (1, 2, 3, 8, 64):
        assert dependence(first[:-lag], first[lag:], size) < 6
    for other in (part(1, 5), part(0, 6)):
        assert dependence(first, other, size) < 6


def test_tensorflows_own_index_shuffle_is_not_random_enough():
    # The reason for using the raw operation with more rounds; if this fails, the public function may suffice.
    positions, shuffle = tf.range(60000, dtype=tf.int64), tf.random.experimental.index_shuffle
    first, second = (shuffle(positions, seed=[7, number], max_index=59999).numpy() for number in (0, 1))
    assert np.corrcoef(first, second)[0, 1] > 0.5


def test_small_permutations_do_not_repeat_after_256_epochs():
    assert len({tuple(epoch(number, 12)) for number in range(300)}) > 297


def test_span_bounds_positions_whose_number_is_not_static():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def function(positions):
        return source.indices(positions, 3, 0, span=7)

    positions = tf.range(4, 11, dtype=tf.int64)
    np.testing.assert_array_equal(function(positions), source.indices(positions, 3, 0))
    with pytest.raises(ValueError, match="span"):
        tf.function(lambda p: source.indices(p, 3, 0), input_signature=function.input_signature)(positions)


@pytest.mark.parametrize(
    ("epochs", "size", "batch_size", "steps"),
    [(1, 10, 5, 2), (1, 10, 4, 3), (3, 10, 4, 8), (0, 10, 4, 0), (1, 3, 10, 1), (0.1, 1000, 100, 1), (0.5, 10, 5, 1)]
    + [(10**6, 10**9 + 1, 7, -(-(10**6) * (10**9 + 1) // 7))],  # exact, unlike in floating point
)
def test_steps_in_epochs(epochs, size, batch_size, steps):
    assert source.steps_in_epochs(epochs, size, batch_size) == steps
