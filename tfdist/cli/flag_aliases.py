"""Names that flags have in other libraries, for messages about unknown flags.

They are those of Lightning, Accelerate, DeepSpeed, torchrun, Horovod, Transformers, Megatron and Keras; none is accepted.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from tfdist.config.train_config import TrainConfig

SAME = {  # other names of our flags
    "accumulate_steps": "gradient_accumulation_steps grad_accumulation_steps accumulate_grad_batches accumulation_steps "
    "accum_steps grad_accum grad_accum_steps accum_iter backward_passes_per_step update_freq",
    "batch_size": "bs b batch global_batch_size train_batch_size",
    "bucket_mb": "bucket_cap_mb fusion_threshold_mb",
    "checkpoint_every": "save_steps save_every save_interval save_freq checkpoint_interval checkpoint_freq ckpt_every "
    "checkpointing_steps",
    "clip_norm": "grad_clip gradient_clip gradient_clipping gradient_clip_val max_grad_norm clip_grad clip_grad_norm "
    "clip_gradients clipnorm global_clipnorm",
    "clip_value": "clipvalue",
    "communication": "backend dist_backend ddp_backend",
    "config": "config_file config_path cfg deepspeed_config",
    "coordinator": "master_addr main_process_ip rdzv_endpoint dist_url",
    "data_dir": "data_path dataset_path dataset_dir data_root",
    "dataset": "data dataset_name",
    "decay": "schedule learning_rate_schedule learning_rate_scheduler scheduler lr_scheduler lr_scheduler_type lr_schedule "
    "lr_decay lr_decay_style",
    "devices": "gpus num_gpus n_gpus n_gpu ngpus num_devices n_devices num_replicas gpus_per_node",
    "epochs": "max_epochs num_epochs n_epochs num_train_epochs train_epochs epoch",
    "eval_every": "eval_steps eval_interval eval_freq val_every val_check_interval validation_steps",
    "keep": "save_total_limit max_to_keep keep_last checkpoints_total_limit",
    "learning_rate": "lr base_lr init_lr initial_lr peak_lr max_lr",
    "log_every": "logging_steps log_interval log_steps log_freq log_every_n_steps print_freq",
    "loss": "criterion loss_fn",
    "mesh_shape": "mesh device_mesh",
    "model": "arch model_name model_type model_name_or_path",
    "optimizer": "opt optim",
    "output_dir": "save_dir log_dir logdir checkpoint_dir ckpt_dir work_dir model_dir default_root_dir outdir out_dir "
    "out run_dir",
    "precision": "dtype mixed_precision torch_dtype",
    "recompute": "gradient_checkpointing activation_checkpointing recompute_activations remat",
    "resume": "resume_from_checkpoint ckpt_path checkpoint ckpt load_checkpoint restore load resume_from",
    "seed": "random_seed rng_seed seed_everything manual_seed",
    "shard": "zero zero_stage deepspeed fsdp sharded_ddp use_distributed_optimizer",
    "start_timeout_seconds": "start_timeout rdzv_timeout",
    "steps": "max_steps num_steps n_steps train_steps num_train_steps max_train_steps train_iters max_iters iterations iters",
    "steps_per_call": "steps_per_execution steps_per_loop",
    "strategy": "distribution_strategy distribute_strategy distributed_type",
    "warmup_steps": "num_warmup_steps lr_warmup_steps lr_warmup_iters warmup warmup_iters",
}
LAUNCHER = {  # other names of flags of `tfdist launch`
    "elastic_timeout_seconds": "elastic_timeout",
    "hosts": "hostfile host_discovery_script",
    "max_restarts": "reset_limit",
    "node_rank": "machine_rank",
    "nodes": "nnodes num_nodes num_machines n_nodes",
    "processes": "np n nproc nprocs num_proc num_procs num_processes nproc_per_node world_size processes_per_node "
    "gpus num_gpus",
}
_MESH = "--strategy=mesh --mesh_shape='data:2;model:4'"
_GLOBAL = "It is the global batch size, over all replicas."
OTHER = {  # what is written differently: our flags, and what else to know
    "accelerator": ("--strategy", ""),
    "amp": ("--precision=mixed_float16", ""),
    "bf16": ("--precision=mixed_bfloat16", ""),
    "bfloat16": ("--precision=mixed_bfloat16", ""),
    "cpu": ("--strategy=single", "GPUs are hidden by CUDA_VISIBLE_DEVICES=-1."),
    "fast_dev_run": ("--steps=1", ""),
    "float16": ("--precision=mixed_float16", ""),
    "fp16": ("--precision=mixed_float16", ""),
    "fp16_allreduce": ("--compression=fp16", ""),
    "gloo": ("--strategy=horovod --communication=gloo", ""),
    "half": ("--precision=mixed_float16", ""),
    "micro_batch_size": ("--accumulate_steps", "Its value is the number of micro-steps of a step."),
    "momentum": ("--optimizer='sgd(momentum=0.9)'", ""),
    "mpi": ("--strategy=horovod --communication=mpi", ""),
    "multi_gpu": ("--strategy=mirrored", ""),
    "per_device_train_batch_size": ("--batch_size", _GLOBAL),
    "per_gpu_train_batch_size": ("--batch_size", _GLOBAL),
    "profiler": ("--profile_steps=10:20", ""),
    "sync_batchnorm": ("--batch_norm=synchronized", ""),
    "sync_bn": ("--batch_norm=synchronized", ""),
    "tensor_model_parallel_size": (_MESH, ""),
    "tensor_parallel_size": (_MESH, ""),
    "torch_compile": ("--jit_compile", ""),
    "tp": (_MESH, ""),
    "train_micro_batch_size_per_gpu": ("--batch_size", _GLOBAL),
    "use_amp": ("--precision=mixed_float16", ""),
    "warmup_ratio": ("--warmup_steps", "Its value is a number of steps."),
    "weight_decay": ("--optimizer='adamw(weight_decay=0.01)'", ""),
    "xla": ("--jit_compile", ""),
}
_LAUNCH = "tfdist launch"


def _by_alias(names: Mapping[str, str]) -> dict[str, str]:
    return {alias: ours for ours, aliases in names.items() for alias in aliases.split()}


_SAME, _LAUNCHER = _by_alias(SAME), _by_alias(LAUNCHER) | {name: name for name in LAUNCHER}


def hint(written: str, known: Mapping[str, Any], program: str) -> str:
    """Returns which of our flags an unknown one may mean, as the end of a message such as ` Use --learning_rate=0.1.`.

    Args:
      written: the unknown flag as it was written, such as "--lr=0.1" or "-np".
      known: the flags of the command, by name, each with a `parser` and `boolean` as in absl.
      program: name of the command, such as "tfdist train".

    Returns:
      The hint, or "" if the flag has no equivalent in this command.
    """
    name, _, value = written.lstrip("-").partition("=")
    name = name.replace("-", "_").lower()
    if name in known:
        return f" Flags are written with underscores, in lower case: {_with_value(name, value, known[name])}."
    if name.startswith("no_") and name[3:] in known and known[name[3:]].boolean:
        return f" Use --no{name[3:]}."
    if name in OTHER:
        ours, note = OTHER[name]
        flags = [word.removeprefix("--").partition("=")[0] for word in ours.split()]
        return f" Use {ours}. {note}".rstrip() if all(flag in known for flag in flags) else ""
    if _SAME.get(name) in known:
        return _use(_SAME[name], value, known[_SAME[name]])
    if _LAUNCHER.get(name) in known:
        return _use(_LAUNCHER[name], value, known[_LAUNCHER[name]])
    if name in _LAUNCHER and "strategy" in known:
        return f" The launcher has it: `{_LAUNCH} --{_LAUNCHER[name]}={value or 'N'} -- {program} ...`."
    ours = _SAME.get(name, name)
    if name == "local_rank" and "strategy" in known:
        return " Each process learns its rank from the launcher's environment variables: leave it out."
    if "processes" in known and ours in TrainConfig.__dataclass_fields__:
        return f" It belongs to the command that is started: write --{ours} after `--`."
    is_of_a_script = program == "tfdist run" and not difflib.get_close_matches(name, known)
    return " Arguments of the script follow its name." if is_of_a_script else ""


def _use(name: str, value: str, flag: Any) -> str:
    choices = getattr(flag.parser, "choices", ())
    more = f": {', '.join(choices[:-1])} or {choices[-1]}" if choices and value not in choices else ""
    return f" Use {_with_value(name, value, flag)}{more}."


def _with_value(name: str, value: str, flag: Any) -> str:
    """Returns our flag with the value that was given, unless it does not accept that."""
    choices = getattr(flag.parser, "choices", ())
    try:
        flag.parser.parse(value)
    except (TypeError, ValueError):
        return f"--{name}"
    return f"--{name}={value}" if value and not flag.boolean and (not choices or value in choices) else f"--{name}"
