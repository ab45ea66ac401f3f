"""Flags without effect: each row of the table, with a job in which the flag has none, and one in which it has."""

import dataclasses

import pytest

from tfdist.config.effects import EFFECTS, Job, without_effect
from tfdist.config.run_config import RunConfig
from tfdist.config.strategy_registry import declared
from tfdist.config.train_config import TrainConfig

ONE, TWO = Job(replicas=1, processes=1), Job(replicas=2, processes=2)
LOCAL = {"sync": "local_sgd", "compression": "fp16"}
RATE = {"momentum_correction": True, "optimizer": "sgd(momentum=0.9)"}
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
    ({"sync": "local_sgd"}, ONE, {"sync": "local_sgd(state='reset')"}, ONE),
    ({"sync": "local_sgd(state='averaged')"}, ONE, {"sync": "slowmo"}, ONE),
    ({"sync": "hierarchical_local_sgd"}, ONE, {"sync": "easgd"}, ONE),
    ({"compression_check_every": 5, **LOCAL}, TWO, {"sync": "every_step"}, TWO),
    ({"balance": "measured"}, ONE, {}, TWO),
    ({"straggler": "drop", "accumulate_steps": 4}, ONE, {}, TWO),
    ({"compression_min_bytes": 0}, TWO, {"compression": "fp16"}, TWO),
    ({"compression_check_every": 5}, TWO, {"compression": "fp16"}, TWO),
    ({"measure_every": 50}, ONE, {}, TWO),
    ({"measure_every": 50, "sync": "local_sgd"}, TWO, {"sync": "every_step"}, TWO),
    ({"check_sync_every": 5}, ONE, {}, TWO),
    ({"check_sync_every": 5}, ONE, {"check_sync": "gradients"}, ONE),
    ({"keep": 1}, ONE, {"checkpoint_every": "5"}, ONE),
    ({"checkpoint_async": False}, ONE, {"checkpoint_every": "60s"}, ONE),
    ({"checkpoint_strict": False}, ONE, {"checkpoint_every": "5"}, ONE),
    ({"momentum_correction": True, "optimizer": "sgd"}, ONE, {**RATE, "decay": "cosine"}, ONE),
    (RATE, ONE, {"warmup_steps": 5}, ONE),
    ({"max_skipped_steps": 5}, ONE, {"precision": "mixed_float16"}, ONE),
    ({"max_skipped_steps": 5}, ONE, {"model": "module:mine"}, ONE),
    ({"start_timeout_seconds": 9.0}, ONE, {}, TWO),
    ({"coordinator": "host:1"}, ONE, {}, TWO),
    ({"token_file": "token"}, ONE, {}, TWO),
    ({"insecure": True}, ONE, {}, TWO),
    ({"batch_norm": "synchronized"}, dataclasses.replace(ONE, has_batch_norm=False), {}, ONE),
    ({"data_dir": "here"}, dataclasses.replace(ONE, uses_data_dir=False), {}, ONE),
]


@pytest.mark.parametrize(
    ("given", "job", "change", "other_job"),
    ROWS,
    ids=lambda value: "-".join(value) if value and isinstance(value, dict) else "",
)
def test_a_flag_without_effect_is_said_once_and_one_with_effect_is_not(given, job, change, other_job):
    [flag, *_] = given
    [text] = without_effect(TrainConfig(strategy="horovod", **given), job, declared("horovod"))
    assert text.startswith(f"--{flag}=") and " has no effect: " in text and "eave it out" in text
    assert without_effect(TrainConfig(strategy="horovod", **given | change), other_job, declared("horovod")) == []


def test_every_row_of_the_table_is_tested_here():
    tested = {flag for given, *_ in ROWS for flag in given}
    assert {effect.flag for effect in EFFECTS} - tested == {"shard_min_elements"}  # below


def test_defaults_are_not_warned_about():
    for name in ("single", "mirrored", "horovod", "mesh"):
        assert without_effect(TrainConfig(strategy=name), ONE, declared(name)) == []
    assert without_effect(TrainConfig(strategy="single", measure_every=0), ONE, declared("single")) == []


def test_an_option_of_other_strategies_names_them():
    [text] = without_effect(TrainConfig(strategy="mirrored", intra_op_threads=2), TWO, declared("mirrored"))
    assert text.startswith("--intra_op_threads=2 has no effect: it is for --strategy=multiworker or horovod or mesh")
    assert without_effect(TrainConfig(strategy="horovod", intra_op_threads=2), TWO, declared("horovod")) == []


def test_the_size_of_what_is_sharded_needs_sharding():
    mesh = {"strategy": "mesh", "mesh_shape": "data:2", "shard_min_elements": 8}
    [text] = without_effect(TrainConfig(**mesh), ONE, declared("mesh"))
    assert "nothing is sharded" in text
    assert without_effect(TrainConfig(**mesh, shard="optimizer"), ONE, declared("mesh")) == []


def test_communication_is_measured_in_steps_with_a_flush():
    measured = {"strategy": "pipeline", "measure_every": 50}
    [text] = without_effect(TrainConfig(**measured, pipeline_schedule="2bw"), TWO, declared("pipeline"))
    assert text.startswith("--measure_every=50 has no effect: ") and "eave it out" in text
    assert without_effect(TrainConfig(**measured), TWO, declared("pipeline")) == []


def test_a_script_has_fewer_flags_and_may_compute_in_float16_by_itself():
    config = RunConfig(strategy="mirrored", bucket_mb=8.0, max_skipped_steps=5)
    [text] = without_effect(config, ONE, declared("mirrored"))
    assert text.startswith("--bucket_mb=8.0 ")
