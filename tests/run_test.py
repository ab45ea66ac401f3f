"""When a run ends, and what falls between its steps."""

from tfdist.run import Schedule


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
