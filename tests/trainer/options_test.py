"""Additional options of `Trainer.fit`: schedules, and values of flags."""

from tfdist.config.train_config import TrainConfig
from tfdist.trainer.options import Checks, Schedule


def test_calls_end_where_something_falls():
    schedule = Schedule(log_every=10, eval_every=4, steps_per_call=5)
    step, ends = 0, []
    while step < 25:
        step += schedule.until(step, 25, [7, 7, 21])
        ends.append(step)
    assert ends == [4, 7, 8, 10, 12, 16, 20, 21, 24, 25]


def test_without_evaluations():
    schedule = Schedule(log_every=100, steps_per_call=3)
    assert [schedule.until(step, 7, []) for step in (0, 3, 6)] == [3, 3, 1]


def test_the_flags_of_a_configuration():
    config = TrainConfig(log_every=7, elastic_batch="replica", check_sync_every=9)
    assert Schedule.of(config) == Schedule(log_every=7, elastic_batch="replica")
    assert Checks.of(config) == Checks(check_sync_every=9, stall_shutdown_seconds=600.0)  # a command ends stalled jobs
    assert Schedule.of(TrainConfig()) == Schedule()
