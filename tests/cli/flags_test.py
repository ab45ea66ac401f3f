"""The set of flags; flags, configurations and flag files are equivalent; which of ours are named for those of others."""

import dataclasses
import math

import pytest
from absl import flags as absl_flags
from hypothesis import assume, given
from hypothesis import strategies as st

from tfdist.cli import command, flags
from tfdist.config.fields import NO_EFFECT_HELP
from tfdist.config.job_config import JobConfig, RunConfig
from tfdist.config.layout_config import LayoutConfig
from tfdist.config.train_config import TrainConfig, VerifyConfig
from tfdist.errors import InputError
from tfdist.export import ExportConfig
from tfdist.launcher.job import Job

# Users have these names in scripts: names may be added but not renamed.
NAMES = """
    accumulate_steps activation_compression all_reduce augment balance base_batch_size batch_norm batch_size best
    bucket_mb bucket_order callbacks
    check_sync_every checkpoint_async checkpoint_every checkpoint_strict
    clip_norm clip_value commit_dir commit_every communication
    compression compression_check_every compression_max_error compression_min_bytes coordinator cut data_dir dataset
    decay devices dry_run early_stopping elastic_batch ema
    epochs eval_every find insecure intra_op_threads jit_compile keep layout learning_rate log_every loggers loss loss_scale
    lr_scaling max_skipped_steps measure_every mesh_shape metrics micro_batches min_table_bytes
    model momentum_correction optimizer output_dir
    overwrite pipeline_schedule precision
    profile_steps recompute resume seed servers shard shard_axis shard_min_elements shard_variables sparse_updates staleness
    stall_shutdown_seconds
    stall_warning_seconds start_timeout_seconds steps steps_per_call strategy sync token_file topology tpu
    warmup_start warmup_steps
""".split()
RUN_NAMES = """
    accumulate_steps all_reduce batch_norm bucket_mb bucket_order clip_norm clip_value communication
    compression compression_min_bytes coordinator devices insecure intra_op_threads jit_compile loss_scale max_skipped_steps
    min_table_bytes precision recompute rows seed servers shard_variables sparse_updates staleness stall_shutdown_seconds
    start_timeout_seconds steps_per_call strategy token_file topology
""".split()


def _parsed(*arguments: str, kind: type[TrainConfig] = TrainConfig) -> TrainConfig:
    values = absl_flags.FlagValues()
    flags.define(values, kind)
    assert values(["program", *arguments]) == ["program"]
    return flags.config(values, kind)


def _names(kind: type[JobConfig | ExportConfig]) -> list[str]:
    values = absl_flags.FlagValues()
    flags.define(values, kind)
    return sorted(values)


def test_the_flag_set_is_pinned():
    assert _names(TrainConfig) == NAMES
    assert sorted(set(_names(VerifyConfig)) - set(NAMES)) == ["float64", "tolerance"]
    assert _names(RunConfig) == RUN_NAMES
    assert _names(ExportConfig) == ["checkpoint", "data_dir", "format", "output", "safe_mode"]


def test_every_flag_says_what_it_means_under_a_topic():
    values = absl_flags.FlagValues()
    flags.define(values, VerifyConfig)
    topics = values.flags_by_module_dict()
    names = ["Model and data", "Duration", "Strategy and devices", "Training", "Gradients", "Checks"]
    assert list(topics) == [*names, NO_EFFECT_HELP]
    assert all(flag.help.endswith(".") for group in topics.values() for flag in group)


@pytest.mark.parametrize("kind", [VerifyConfig, LayoutConfig])
def test_flags_without_effect_are_flags_of_training(kind):
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert kind.ignored_flags and {*kind.ignored_flags} < names
    assert not {"model", "dataset", "batch_size", "mesh_shape"} & {*kind.ignored_flags}


def test_flags_are_fields():
    parsed = _parsed("--batch_size=128", "--jit_compile", "--learning_rate", "3e-4", "--model=mlp(width=8)")
    assert parsed == TrainConfig(batch_size=128, jit_compile=True, learning_rate=3e-4, model="mlp(width=8)")


_line = st.text(st.characters(codec="utf-8"), max_size=20).filter(str.isprintable)
_known = {
    "model": st.sampled_from(["cnn", "mlp(width=(8, 'a b'))", "own.module:make(x='#\"')"]),
    "dataset": st.sampled_from(["digits", "synthetic:8x8x1", "tfds:mnist/3.0.1"]),
    "optimizer": st.floats(0, 1).map(lambda x: f"sgd(momentum={x!r})"),
    "loss": st.sampled_from(["mean_squared_error"]),
    "metrics": st.sampled_from(["", "accuracy,top_k"]),
    "strategy": st.sampled_from(["auto", "single", "mirrored", "own.module:Class"]),
    "communication": st.sampled_from(["auto", "ring", "nccl", "gloo", "mpi"]),
    "batch_norm": st.sampled_from(["local", "synchronized"]),
    "coordinator": st.sampled_from(["", "host:3000"]),
    "profile_steps": st.sampled_from(["", "3:5"]),
    "decay": st.sampled_from(["none", "cosine(to=0.1)", "step(every=5)"]),
    "lr_scaling": st.sampled_from(["none", "linear"]),
    "precision": st.sampled_from(["float32", "mixed_float16"]),
    "loss_scale": st.sampled_from(["", "128", "dynamic(hysteresis=2)"]),
    "compression": st.sampled_from(["none", "topk(ratio=0.01)|fp16", "path=.*bias: none; size>=100: int8"]),
    "data_dir": _line,
}


def _values_of(field: dataclasses.Field) -> st.SearchStrategy:
    flag = field.metadata["flag"]
    maximum = flag.maximum if math.isfinite(flag.maximum) else 10**9
    numbers = {int: st.integers(int(flag.minimum), int(maximum)), float: st.floats(flag.minimum, maximum)}
    by_type = {bool: st.booleans(), **numbers}
    return _known[field.name] if field.name in _known else by_type.get(type(field.default), _line)


def _configs(kind: type[TrainConfig]) -> st.SearchStrategy[TrainConfig]:
    def made(values: dict) -> TrainConfig:
        try:
            return kind(**values)
        except InputError:  # two of the flags exclude each other
            assume(False)
            raise

    fields = {field.name: _values_of(field) for field in dataclasses.fields(kind)}
    return st.fixed_dictionaries({}, optional=fields).map(made)


@given(config=st.one_of(_configs(TrainConfig), _configs(VerifyConfig)))
def test_a_flag_file_says_the_same(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("flags") / "flags.txt"
    path.write_text(flags.flags_text(config), encoding="utf-8")
    assert _parsed(f"--flagfile={path}", kind=type(config)) == dataclasses.replace(config, output_dir="")


def test_a_flag_file_keeps_the_output_directory_as_a_comment():
    lines = flags.flags_text(TrainConfig(output_dir="runs/one", strategy="mirrored")).splitlines()
    assert "# --output_dir=runs/one" in lines
    assert "--strategy=mirrored" in lines
    assert [line.removeprefix("# ").partition("=")[0] for line in lines] == [
        f"--{field.name}" for field in dataclasses.fields(TrainConfig)
    ]


OURS = {field.name for field in dataclasses.fields(TrainConfig)} | {"config"}
LAUNCHERS = {field.name for field in dataclasses.fields(Job)}


def test_another_name_is_that_of_one_flag_and_no_flag_of_ours():
    for names, ours in ((command.OTHER_NAMES, OURS), (command.LAUNCHER_NAMES, LAUNCHERS)):
        assert names.keys() <= ours
        others = [other for text in names.values() for other in text.split()]
        assert len(others) == len({*others}) and not ours & {*others}
