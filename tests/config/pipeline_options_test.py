"""Options that a pipeline without a flush cannot have: one rule for flags and for arguments."""

import keras
import pytest

import tfdist
from tfdist.config.pipeline_options import check_without_flush
from tfdist.errors import InputError
from tfdist.gradients import Clip, LossScale

REFUSED = {
    "clip_norm": (0.5, "--clip_norm=0.5"),
    "loss_scale": ("--precision=mixed_float16", "--precision=mixed_float16"),
    "shared": ("table/embeddings", "table/embeddings"),
    "shard": ("optimizer", "--shard=optimizer"),
    "activation_compression": ("int8", "--activation_compression=int8"),
    "find": ("learning_rate", "--find=learning_rate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_without_a_flush(name: str) -> None:
    value, received = REFUSED[name]
    with pytest.raises(InputError) as error:
        check_without_flush("pipedream(vertical_sync=True)", **{name: value})
    assert f", or use 1f1b. Received: {received} --pipeline_schedule=pipedream(vertical_sync=True)." in str(error.value)
    for schedule in ("1f1b", "csv:any.csv"):
        check_without_flush(schedule, **{name: value})


def test_what_is_not() -> None:
    check_without_flush("2bw")


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"shard": "optimizer"}, "shard=optimizer"),
        ({"activation_compression": "bf16"}, "activation_compression=bf16"),
    ],
)
def test_a_strategy_refuses_them(options: dict[str, str], received: str) -> None:
    with pytest.raises(InputError, match=f"Received: {received} pipeline_schedule=pipedream"):
        tfdist.load_strategy("pipeline", pipeline_schedule="pipedream", **options)


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"clip": Clip(norm=0.5)}, "clip_norm=0.5"),
        ({"loss_scale": LossScale(initial=8.0)}, "LossScale\\(initial=8.0, "),
    ],
)
def test_a_trainer_refuses_them(options: dict[str, object], received: str) -> None:
    strategy = tfdist.load_strategy("pipeline", pipeline_schedule="pipedream")
    with strategy.scope(), pytest.raises(InputError, match=f"Received: {received}.* pipeline_schedule=pipedream"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        tfdist.Trainer(model, optimizer="sgd", loss="mse", **options)
