"""A run's batch size and learning rate with other numbers of replicas."""

import dataclasses
import json

import pytest

from tfdist.data import StreamPosition
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.errors import InputError

BEGUN = BatchSchedule.begun(StreamPosition(12), 0, 40, batch_size=12, replicas=3)


def test_the_batch_of_one_replica_stays():
    fewer = BEGUN.on(2, 3, 12, "replica")
    assert (fewer.position, fewer.rate) == (StreamPosition(8, step=3, examples=36), 2 / 3)
    more = fewer.on(5, 5, 12, "replica")
    assert (more.position, more.rate) == (StreamPosition(20, step=5, examples=52), 5 / 3)
    back = more.on(3, 6, 12, "replica")
    assert (back.position, back.rate) == (StreamPosition(12, step=6, examples=72), 1)


def test_a_person_is_told():
    assert str(BEGUN.on(2, 3, 12, "replica")) == (
        "A batch has 8 examples: the run began with 12 on 3 replicas, and keeps the batch size per replica. The "
        "learning rate is multiplied by 0.666667."
    )


def test_the_global_batch_stays():
    for replicas in (2, 5, 12):
        assert BEGUN.on(replicas, 3, 12, "global") == BEGUN


def test_a_global_batch_of_ones_own_is_a_new_beginning():
    other = BEGUN.on(2, 3, 10, "global")
    assert (other.position, other.batch_size, other.replicas, other.rate) == (StreamPosition(10, 3, 36), 10, 2, 1)


def test_one_may_follow_on_the_other():
    fewer = BEGUN.on(2, 3, 12, "global").on(2, 5, 12, "replica")
    assert (fewer.position, fewer.rate) == (StreamPosition(8, 5, 60), 2 / 3)
    assert fewer.on(2, 6, 12, "global").position == StreamPosition(12, 6, 68)


def test_epochs_end_where_their_examples_do():
    fewer = BEGUN.on(2, 3, 12, "replica")
    assert BEGUN.end(0, 2, 40) == 7
    assert fewer.end(0, 2, 40) == 3 + -(-(80 - 36) // 8)
    assert fewer.end(7, 0, 40) == 7


def test_it_comes_back_from_a_checkpoint():
    batch_schedule = BEGUN.on(2, 3, 12, "replica")
    assert BatchSchedule.of({"course": json.loads(json.dumps(batch_schedule.to_json()))}) == batch_schedule
    assert BatchSchedule.of({"begun_at": 0}) is None


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
        batch_schedule.on(2, 3, batch_size, elastic_batch)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
