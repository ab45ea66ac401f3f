"""The arithmetic of positions, compared with counting every example."""

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdist.data import StreamPosition, steps_in_epochs

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
        found.append(found[-1].then(step, batch))
    return found


@hypothesis.given(run=runs())
@SETTINGS
def test_where_each_step_begins(run):
    size, batches = run
    for step, position in enumerate(positions(batches)):
        assert position.before(step) == sum(batches[:step])
        assert position.epoch(step, size) == sum(batches[:step]) // size
        assert position.batch_size == batches[step]


@hypothesis.given(run=runs(), now=st.integers(0, STEPS - 1), more=st.integers(1, 30))
@SETTINGS
def test_how_many_steps_examples_take(run, now, more):
    """From any step, with all later batches of its position's batch size."""
    _, batches = run
    position = positions(batches)[now]
    wanted = position.before(now) + more
    used, steps = position.before(now), now
    while used < wanted:
        used, steps = used + position.batch_size, steps + 1
    assert position.steps_for(wanted) == steps
    assert position.steps_for(position.before(now)) == now


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
        before = (
            StreamPosition(batches[step - 1], step - 1, used - batches[step - 1]) if step else StreamPosition(batch)
        )
        assert before.epochs_from(step, size) == (ended if step and ended > used - batches[step - 1] else used)
        used += batch
        ended = used - used % size


@hypothesis.given(size=st.integers(1, 50), batch_size=st.integers(1, 60), epochs=st.integers(0, 9))
@SETTINGS
def test_a_batch_that_never_changes(size, batch_size, epochs):
    position = StreamPosition(batch_size)
    assert position.then(7, batch_size) is position
    assert position.before(5) == 5 * batch_size
    assert position.steps_for(epochs * size) == steps_in_epochs(epochs, size, batch_size)
    assert position.end_of_epoch(epochs, size) == steps_in_epochs(epochs + 1, size, batch_size)


@pytest.mark.parametrize(
    ("size", "step", "place"),
    [(10, 5, 20), (10, 3, 10), (10, 4, 16), (10, 0, 0), (3, 2, 6), (3, 1, 3), (7, 2, 7), (9, 2, 8)],
)
def test_an_end_that_a_batch_of_four_goes_beyond(size, step, place):
    assert StreamPosition(4).epochs_from(step, size) == place
