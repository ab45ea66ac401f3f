"""The declarations of strategies, and that they match their behavior; options that a pipeline without a flush cannot have."""

import dataclasses
import inspect
import pathlib

import keras
import pytest

import tfdist
from tfdist.config.conflicts import check_strategy
from tfdist.config.fields import field_names
from tfdist.config.pipeline import check_without_flush
from tfdist.config.strategy_registry import (
    AUTO,
    DECLARATIONS,
    NAMES,
    REFERENCE,
    Declaration,
    strategy_declaration,
)
from tfdist.config.train_config import TrainConfig
from tfdist.distribution.factory import strategy_class
from tfdist.errors import InputError
from tfdist.gradients import Clip, LossScale

FILES = pathlib.Path(__file__).parents[2] / "strategies"


def test_each_file_of_strategies_is_declared():
    files = {path.stem for path in FILES.glob("*.py")} - {"__init__"}
    assert files == set(NAMES)
    assert REFERENCE in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_declared_options_are_those_of_the_constructor(name):
    parameters = set(inspect.signature(strategy_class(name)).parameters)
    assert set(strategy_declaration(name).options or ()) == parameters & set(field_names(TrainConfig, "is_option"))


@pytest.mark.parametrize("name", NAMES)
def test_keras_fit_runs_where_replicas_take_any_number_of_rows(name):
    found = strategy_class(name)
    takes_any = found.trains_whole_model and not found.compiles_replicas
    assert strategy_declaration(name).runs_keras_fit == takes_any


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda declaration: declaration.name)
def test_what_is_refused_is_a_flag(declaration):
    for flag, refusal in declaration.refuses.items():
        rule = refusal if isinstance(refusal, str) else refusal[1]
        assert hasattr(TrainConfig, flag) and f"--{flag}" in rule and rule.endswith(".")


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda declaration: declaration.name)
def test_what_is_accepted_is_known_to_the_flag_and_has_its_default(declaration):
    for name, values in declaration.accepts.items():
        [field] = [field for field in dataclasses.fields(TrainConfig) if field.name == name]
        assert name in declaration.options
        assert set(values) <= set(field.metadata["flag"].choices) and field.default in values


def test_auto_takes_the_options_of_the_strategies_that_it_may_choose():
    taken = {"devices", "communication", "intra_op_threads", "all_reduce", "shard", "topology", "servers", "staleness"}
    taken |= {"sparse_updates", "shard_variables", "min_table_bytes"}
    assert set(strategy_declaration(AUTO).options or ()) == taken
    TrainConfig(strategy=AUTO, devices=2, communication="ring")
    with pytest.raises(
        InputError, match="--tpu is for --strategy=tpu: use it or leave out --tpu. Received: --tpu=mine"
    ):
        TrainConfig(strategy=AUTO, tpu="mine")


def test_a_user_s_own_strategy_has_an_empty_declaration():
    assert strategy_declaration("own.module:Class") == Declaration(name="own.module:Class")


def test_a_third_party_s_declaration_refuses_flags():
    own = Declaration(name="own", options=("devices",), refuses={"compression": "Own sums by itself: use none."})
    config = TrainConfig(strategy="own.module:Class", devices=2)
    check_strategy(config, own)
    with pytest.raises(InputError, match="Own sums by itself: use none. Received: --compression=fp16 --strategy=own"):
        check_strategy(TrainConfig(strategy="own.module:Class", compression="fp16"), own)
    with pytest.raises(InputError, match="--tpu is for --strategy=tpu"):
        check_strategy(TrainConfig(strategy="own.module:Class", tpu="mine"), own)


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
    check_without_flush("1f1b", **{name: value})


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
