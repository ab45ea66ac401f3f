"""The records of a run, and the detection of a slow rank."""

import pytest

from tfdist.trainer.records import History, SlowRank


def found(records, every=20, step_seconds=0.1):
    slow = SlowRank()
    return [slow.observe(times, step_seconds, every * number) for number, times in enumerate(records, 1)]


def test_a_rank_that_is_slow_for_long_is_named_with_its_cost():
    said = found([[0.04, 0.08]] * 6)
    assert said[:5] == [None] * 5
    assert said[5] == (
        "Rank 1 takes 2.0 times as long as the others to load input and compute gradients, and they wait for it during 40% of "
        "each step."
    )


def test_of_several_ranks_the_slowest_is_compared_with_the_usual():
    assert "Rank 2 takes 1.5 times" in found([[0.04, 0.05, 0.075, 0.05]] * 6)[-1]


@pytest.mark.parametrize(
    "records",
    [
        [[0.04, 0.08], [0.08, 0.04]] * 10,  # now one, now the other
        [[0.04, 0.08]] * 5 + [[0.05, 0.05]] + [[0.04, 0.08]] * 4,  # not for long
        [[0.04, 0.045]] * 20,  # hardly slower
        [[0.004, 0.008]] * 20,  # of no consequence
        [[0.08]] * 20,
        [[None, None]] * 20,
        [[0.04, None]] * 20,
    ],
)
def test_noise_is_not_reported(records):
    assert not any(found(records))


def test_records_of_every_step_need_more_of_them():
    assert not any(found([[0.4, 0.8]] * 50, every=1, step_seconds=1.0))
    assert any(found([[0.4, 0.8]] * 51, every=1, step_seconds=1.0))


def test_few_records_are_not_enough():
    assert [bool(each) for each in found([[0.04, 0.08]] * 5, every=1000)] == [False] * 4 + [True]


def test_a_rank_that_is_slow_for_less_than_ten_seconds_is_not_reported():
    assert not any(found([[0.004, 0.008]] * 50, step_seconds=0.01))  # 9.8 s
    assert any(found([[0.004, 0.008]] * 52, step_seconds=0.01))


def test_the_last_record_of_a_kind():
    history = History()
    with pytest.raises(KeyError, match="No record of kind 'train'"):
        history.last("train")
    history.records += [{"kind": "train", "step": 1}, {"kind": "train", "step": 2}, {"kind": "eval", "step": 1}]
    assert history.last("train")["step"] == 2
    with pytest.raises(KeyError, match=r"Received kinds: \['eval', 'train'\]"):
        history.last("nope")
