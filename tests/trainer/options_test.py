"""Arguments of `Trainer` and options of `Trainer.fit`: models that are refused, schedules, and values of flags."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError
from tfdist.trainer.options import Checks, Schedule


def test_calls_end_where_something_falls():
    schedule = Schedule(log_every=10, eval_every=4, steps_per_call=5)
    step, ends = 0, []
    while step < 25:
        step += schedule.call_steps(step, 25, [7, 7, 21])
        ends.append(step)
    assert ends == [4, 7, 8, 10, 12, 16, 20, 21, 24, 25]


def test_the_flags_of_a_configuration():
    config = TrainConfig(log_every=7, elastic_batch="replica", check_sync_every=9)
    assert Schedule.from_config(config) == Schedule(log_every=7, elastic_batch="replica")
    assert Checks.from_config(config) == Checks(
        check_sync_every=9, stall_shutdown_seconds=600.0
    )  # a command ends stalled jobs
    assert Schedule.from_config(TrainConfig()) == Schedule()


def test_numbers_of_numpy_are_those_of_python():
    schedule = Schedule(log_every=np.int64(3), eval_every=np.uint8(4), steps_per_call=np.int32(5))
    assert schedule == Schedule(log_every=3, eval_every=4, steps_per_call=5)
    assert type(schedule.call_steps(0, 25, [])) is int
    assert str(Checks(compression_max_error=np.float64(0.5))) == str(Checks(compression_max_error=0.5))


@pytest.mark.parametrize("name", ["train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"])
def test_a_model_with_a_step_of_its_own_is_refused(name, single):
    own = type("Own", (keras.Model,), {name: lambda self, *args, **kwargs: None})
    with single.scope(), pytest.raises(InputError, match=f"Received: a Own that overrides {name}. Use Keras's own fit"):
        tfdist.Trainer(own(), optimizer="sgd", loss="mse")


def test_a_model_with_a_step_as_an_attribute_is_refused(single):
    with (
        single.scope(),
        pytest.raises(InputError, match="Received: a Sequential that overrides train_step. Use Keras's own fit"),
    ):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.train_step = lambda data: {}
        tfdist.Trainer(model, optimizer="sgd", loss="mse")
