"""Flags of other libraries: which of ours are named instead."""

import dataclasses
import shlex

import pytest
from absl import flags as absl_flags

from tfdist.cli import flag_aliases, flags
from tfdist.config.train_config import TrainConfig
from tfdist.launcher.job import Job

OURS = {field.name for field in dataclasses.fields(TrainConfig)} | {"config"}
LAUNCHERS = {field.name for field in dataclasses.fields(Job)}


def test_every_flag_that_is_named_exists():
    assert flag_aliases.SAME.keys() <= OURS
    assert flag_aliases.LAUNCHER.keys() <= LAUNCHERS
    for ours, _ in flag_aliases.OTHER.values():
        values = absl_flags.FlagValues()
        flags.define(values)
        written = shlex.split(ours)
        given = [word for word in written if "=" in word or values[word[2:]].boolean]
        assert {word.partition("=")[0][2:] for word in written} <= OURS
        assert values(["program", *given]) == ["program"]
        flags.config(values)


def test_an_alias_is_in_one_place_and_no_flag_of_ours():
    same = [alias for aliases in flag_aliases.SAME.values() for alias in aliases.split()]
    launched = [alias for aliases in flag_aliases.LAUNCHER.values() for alias in aliases.split()]
    known = [*same, *flag_aliases.OTHER]
    assert len(known) == len({*known}) and len(launched) == len({*launched})
    assert not OURS & {*known}
    assert not LAUNCHERS & {*launched}


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("--lr 0.1", "Use --learning_rate."),
        ("--gpus=2", "Use --devices=2."),
        ("--num_gpus=2", "Use --devices=2."),
        ("--gpus=all", "Use --devices."),
        ("--fp16", "Use --precision=mixed_float16."),
        ("--bf16", "Use --precision=mixed_bfloat16."),
        ("--zero=2", "Use --shard: none, optimizer, gradients or parameters."),
        ("--mixed_precision=fp16", "Use --precision: float32, mixed_bfloat16 or mixed_float16."),
        ("--backend=nccl", "Use --communication=nccl."),
        ("--max_steps=10", "Use --steps=10."),
        ("--max_epochs=10", "Use --epochs=10."),
        ("--num-train-epochs=3", "Use --epochs=3."),
        ("--gradient_accumulation_steps=4", "Use --accumulate_steps=4."),
        ("--grad_clip=1.0", "Use --clip_norm=1.0."),
        ("--save_dir=runs/x", "Use --output_dir=runs/x."),
        ("--per_device_train_batch_size=8", "Use --batch_size. It is the global batch size, over all replicas."),
        ("--weight_decay=0.01", "Use --optimizer='adamw(weight_decay=0.01)'."),
        ("--batch-size=8", "Flags are written with underscores, in lower case: --batch_size=8."),
        ("--Batch_Size=8", "in lower case: --batch_size=8."),
        ("--jit-compile", "in lower case: --jit_compile."),
        ("--no-checkpoint-async", "Use --nocheckpoint_async."),
        ("-np 2", "-np is not a flag of tfdist.train. The launcher has it: `python -m tfdist.launch --processes=N -- "),
        ("--nproc=4", "`python -m tfdist.launch --processes=4 -- python -m tfdist.train ...`."),
        ("--processes=4", "`python -m tfdist.launch --processes=4 -- python -m tfdist.train ...`."),
        ("--nnodes=2", "`python -m tfdist.launch --nodes=2 -- python -m tfdist.train ...`."),
    ],
)
def test_the_hint(refusal, written: str, hint: str):
    assert hint in refusal(*shlex.split(written))


@pytest.mark.parametrize(
    ("written", "hint"),
    [("-np 2", "Use --processes."), ("--nproc_per_node=2", "Use --processes=2."), ("--hostfile=h", "Use --hosts=h.")],
)
def test_the_hint_of_the_launcher(refusal, written: str, hint: str):
    assert hint in refusal(*shlex.split(written), name="launch")


def test_a_command_without_the_flag_gives_no_hint(refusal):
    rest = "--lr is not a flag of tfdist.ledger. `python -m tfdist.ledger --help` lists the flags.\n"
    assert refusal("--lr=0.1", name="ledger") == f"tfdist.ledger: {rest}"
