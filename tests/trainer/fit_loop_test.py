"""When a run ends, and what falls between its steps."""

import pytest

from tfdist.trainer.fit_loop import History, Schedule


def test_calls_end_where_something_falls():
    schedule = Schedule(steps=25, log_every=10, eval_every=4, steps_per_call=5)
    step, ends = 0, []
    while step < 25:
        step += schedule.until(step, [7, 7, 21])
        ends.append(step)
    assert ends == [4, 7, 8, 10, 12, 16, 20, 21, 24, 25]


def test_without_evaluations():
    schedule = Schedule(steps=7, log_every=100, steps_per_call=3)
    assert [schedule.until(step, []) for step in (0, 3, 6)] == [3, 3, 1]


def test_the_last_record_of_a_kind():
    history = History()
    with pytest.raises(KeyError, match="No record of kind 'train'"):
        history.last("train")
    history.records += [{"kind": "train", "step": 1}, {"kind": "train", "step": 2}, {"kind": "eval", "step": 1}]
    assert history.last("train")["step"] == 2
    with pytest.raises(KeyError, match=r"Received kinds: \['eval', 'train'\]"):
        history.last("nope")
