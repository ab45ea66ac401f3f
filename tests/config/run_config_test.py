"""The values that a configuration accepts and rejects, and flags without effect in a job, each with one in which it has."""

import dataclasses

import pytest

from tfdist.config.conflicts import EFFECTS, JobProperties, effect_warnings
from tfdist.config.job_config import RunConfig
from tfdist.config.layout_config import LayoutConfig
from tfdist.config.strategy_registry import strategy_declaration
from tfdist.config.train_config import TrainConfig, VerifyConfig
from tfdist.errors import InputError


def test_defaults_are_a_whole_run():
    config = TrainConfig()
    assert (config.strategy, config.model, config.dataset) == ("auto", "cnn", "digits")
    assert (config.steps, config.epochs) == (0, 10)
    assert (VerifyConfig().steps, VerifyConfig().epochs) == (10, 0)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"data_dir": ""}, {"data_dir": None}),
        ({"learning_rate": 1}, {"learning_rate": 1.0}),
        ({"optimizer": " sgd( momentum = .9 )"}, {"optimizer": "sgd(momentum=0.9)"}),
        ({"metrics": "accuracy, mean_absolute_error"}, {"metrics": "accuracy,mean_absolute_error"}),
        ({"metrics": ""}, {"metrics": ""}),
        ({"output_dir": " runs/one "}, {"output_dir": "runs/one"}),
        ({"profile_steps": "10:20"}, {"profile_steps": "10:20"}),
        ({"coordinator": "[::1]:3000"}, {"coordinator": "[::1]:3000"}),
        ({"seed": 2**31 - 1}, {"seed": 2**31 - 1}),
    ],
)
def test_keeps(given, kept):
    config = TrainConfig(**given)
    assert {name: getattr(config, name) for name in kept} == kept


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_size", True, "batch_size must be of type int"),
        ("dry_run", 1, "dry_run must be of type bool"),
        ("model", None, "model must be of type str"),
        ("seed", 2**31, "--seed must be at least 0 and at most 2147483647. Received: 2147483648."),
        ("learning_rate", float("inf"), "--learning_rate must be at least 0 and finite. Received: inf."),
        ("metrics", "top_k(k=5)", "--metrics: top_k(k=5) must be comma-separated names."),
        ("output_dir", "a\nb", r"--output_dir must be one line of printable text. Received: 'a\nb'."),
    ],
)
def test_refuses(field, value, message):
    """tests/cli/wrong_uses.tsv has more, as whole lines."""
    with pytest.raises(InputError) as caught:
        TrainConfig(**{field: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "received"),
    [
        ({"profile_steps": "50:60", "steps": 50}, "--profile_steps=50:60 --steps=50"),
        ({"mesh_shape": "data:2"}, "--mesh_shape=data:2 --strategy=auto"),
        ({"warmup_start": 0.5}, "--warmup_start=0.5 --warmup_steps=0"),
        ({"strategy": "mesh", "compression": "int8"}, "--compression=int8 --strategy=mesh"),
        ({"strategy": "mesh", "jit_compile": True}, "--jit_compile=true --strategy=mesh"),
    ],
)
def test_refuses_together(given, received):
    with pytest.raises(InputError, match=f"Received: {received}"):
        TrainConfig(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"devices": 2, "strategy": "mirrored"},
        {"devices": 2, "strategy": "auto"},
        {"devices": 2, "strategy": "own.module:Class"},
        {"sync": "local_sgd", "compression": "size>=1000: int8; *: bf16"},
        {"strategy": "pipeline", "compression": "size>=1000: int8; *: bf16"},
        {"tpu": "mine", "strategy": "tpu"},
        {"tpu": "mine", "strategy": "own.module:Class"},
        {"communication": "ring", "strategy": "multiworker"},
        {"communication": "ring", "strategy": "auto"},
        {"communication": "mpi", "strategy": "horovod"},
        {"jit_compile": True},
        {"batch_norm": "synchronized"},
        {"optimizer": "sgd(learning_rate=0.1)"},
        {"profile_steps": "50:60", "steps": 51},
        {"profile_steps": "50:60", "epochs": 1},
        {"strategy": "mesh", "devices": 2},
        {"strategy": "mesh", "mesh_shape": "data:2;model:2", "layout": "ffn:model"},
    ],
)
def test_accepts_together(given):
    TrainConfig(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layout": "ffn"}, "--layout: A layout is a list of DIM:AXIS"),
        ({"mesh_shape": "data:2", "layout": "ffn:model"}, "The mesh data:2 has no axis model"),
        ({"shard": "optimizer", "shard_axis": "model"}, "The mesh data:1 has no axis model"),
    ],
)
def test_a_mesh_is_checked_when_flags_are_read(given, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(strategy="mesh", **given)


def test_a_search_for_a_layout_is_no_training():
    LayoutConfig(mesh_shape="data:2;model:2", layout="auto", memory_gb=0.5)
    with pytest.raises(InputError, match="--layout: auto is only for `tfdist layout`"):
        TrainConfig(strategy="mesh", layout="auto")


def test_a_chosen_strategy_is_checked_again():
    with pytest.raises(InputError, match="--devices=2 --strategy=multiworker"):
        dataclasses.replace(TrainConfig(devices=2), strategy="multiworker")


@pytest.mark.parametrize("lossy", [{"precision": "mixed_float16"}, {"compression": "int8"}])
def test_what_is_not_exact_by_design_may_have_a_tolerance(lossy):
    assert VerifyConfig(**lossy, tolerance=0.1).tolerance == 0.1


ONE, TWO = JobProperties(replicas=1), JobProperties(replicas=2)
LOCAL = {"sync": "local_sgd", "compression": "fp16"}
PIPELINE = {"strategy": "pipeline"}
# By name of the flag: what is given, the job without an effect, and what gives it one.
ROWS = [
    ({"bucket_mb": 8.0}, ONE, {}, TWO),
    ({"bucket_order": "smallest"}, ONE, {}, TWO),
    ({"all_reduce": "ring"}, ONE, {}, TWO),
    ({"topology": "1,1"}, TWO, {"all_reduce": "hierarchical"}, TWO),
    ({"topology": "1"}, ONE, {"all_reduce": "auto"}, TWO),
    ({"sync": "local_sgd"}, ONE, {}, TWO),
    ({"sync": "local_sgd"}, ONE, {"sync": "fedavg"}, ONE),
    ({"sync": "local_sgd"}, ONE, {"sync": "diloco"}, ONE),
    ({"sync": "local_sgd(state='averaged')"}, ONE, {"sync": "local_sgd(state='reset')"}, ONE),
    ({"sync": "hierarchical_local_sgd"}, ONE, {"sync": "easgd"}, ONE),
    ({"compression_check_every": 5, **LOCAL}, TWO, {"sync": "every_step"}, TWO),
    ({"compression_min_bytes": 0}, TWO, {"compression": "fp16"}, TWO),
    ({"compression_check_every": 5}, TWO, {"compression": "fp16"}, TWO),
    ({"measure_every": 50}, ONE, {}, TWO),
    ({"measure_every": 50, "sync": "local_sgd"}, TWO, {"sync": "every_step"}, TWO),
    ({"check_sync_every": 5}, ONE, {}, TWO),
    ({"keep": 1}, ONE, {"checkpoint_every": "5"}, ONE),
    ({"checkpoint_async": False}, ONE, {"checkpoint_every": "60s"}, ONE),
    ({"checkpoint_strict": False}, ONE, {"checkpoint_every": "5"}, ONE),
    ({"momentum_correction": True, "optimizer": "sgd"}, ONE, {"optimizer": "sgd(momentum=0.9)"}, ONE),
    ({"batch_norm": "synchronized"}, dataclasses.replace(ONE, has_batch_norm=False), {}, ONE),
    ({"data_dir": "here"}, dataclasses.replace(ONE, uses_data_dir=False), {}, ONE),
    ({"shard_min_elements": 8, "strategy": "mesh", "mesh_shape": "data:2"}, ONE, {"shard": "optimizer"}, ONE),
    ({"measure_every": 50, **PIPELINE, "pipeline_schedule": "2bw"}, TWO, {"pipeline_schedule": "1f1b"}, TWO),
]


@pytest.mark.parametrize(
    ("given", "job", "change", "other_job"),
    ROWS,
    ids=lambda value: "-".join(value) if value and isinstance(value, dict) else "",
)
def test_a_flag_without_effect_is_said_once_and_one_with_effect_is_not(given, job, change, other_job):
    [flag, *_] = given
    given = {"strategy": "horovod", **given}
    strategy = strategy_declaration(given["strategy"])
    [text] = effect_warnings(TrainConfig(**given), job, strategy)
    assert text.startswith(f"--{flag}=") and " has no effect: " in text and "emove " in text
    assert ("nothing is sharded" in text) == (flag == "shard_min_elements")
    assert effect_warnings(TrainConfig(**given | change), other_job, strategy) == []


def test_every_row_of_the_table_is_tested_here():
    tested = {flag for given, *_ in ROWS for flag in given}
    assert {flag for effect in EFFECTS for flag in effect.flags.split()} <= tested


def test_defaults_are_not_warned_about():
    for name in ("single", "mirrored", "horovod", "mesh"):
        assert effect_warnings(TrainConfig(strategy=name), ONE, strategy_declaration(name)) == []
    assert effect_warnings(TrainConfig(strategy="single", measure_every=0), ONE, strategy_declaration("single")) == []


def test_an_option_of_other_strategies_names_them():
    [text] = effect_warnings(
        TrainConfig(strategy="mirrored", intra_op_threads=2), TWO, strategy_declaration("mirrored")
    )
    assert text.startswith("--intra_op_threads=2 has no effect: it is for --strategy=multiworker or horovod or mesh")
    assert (
        effect_warnings(TrainConfig(strategy="horovod", intra_op_threads=2), TWO, strategy_declaration("horovod")) == []
    )


def test_a_script_has_fewer_flags():
    config = RunConfig(strategy="mirrored", bucket_mb=8.0)
    [text] = effect_warnings(config, ONE, strategy_declaration("mirrored"))
    assert text.startswith("--bucket_mb=8.0 ")
