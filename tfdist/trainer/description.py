"""Describes what is trained on what, for the lines at the start of a run."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data import DataSet, Examples
from tfdist.data.row_allocation import EVEN, RowAllocation
from tfdist.distribution.strategy import Strategy
from tfdist.errors.byte_sizes import byte_size
from tfdist.errors.counts import count_of
from tfdist.pipelining.staged_model import whole_model
from tfdist.reporting import RunPlan
from tfdist.sharding.balanced_parts import describe_parts
from tfdist.step.settings import Settings
from tfdist.trainer.program import Program

_SHOWN = 8  # replicas whose rows are listed


def describe(
    program: Program, data: DataSet, plan: RunPlan, strategy_reason: str = "", allocation: RowAllocation = EVEN
) -> dict[str, str]:
    """Returns texts by name: model, data, strategy, batch and length of a run.

    Args:
      program: what is trained.
      data: examples for training and, optionally, for evaluation.
      plan: plan of the run.
      strategy_reason: why the strategy was chosen; empty for none.
      allocation: how the rows of a batch are allocated at its beginning.
    """
    return {
        "model": describe_model(program.model),
        "data": describe_data(data),
        "strategy": describe_strategy(program.strategy),
        "stages": program.strategy.parts.description(program.model),
        "optimizer": describe_optimizer(program.model, program.strategy),
        "chosen": strategy_reason,
        "batch": data.train.batch_text
        or _batch(program.strategy, program.settings, plan.batch_size, program.model.dtype_policy.name, allocation),
        "sync": str(program.settings.sync) if program.settings.sync.exchanges_weights else "",
        "length": _length(plan),
    }


def describe_model(model: keras.Model) -> str:
    """Returns for example `mlp, 55,050 parameters (215.0 KiB)`."""
    model = whole_model(model)
    count, trained = _count(model.weights), _count(model.trainable_weights)
    size = sum(_count([v]) * tf.as_dtype(keras.backend.standardize_dtype(v.dtype)).size for v in model.weights)
    frozen = "" if trained == count else f", {trained:,} of them trainable"
    return f"{model.name}, {count:,} parameters ({byte_size(size)}){frozen}"


def describe_data(data: DataSet) -> str:
    """Returns for example `digits, 1,437 examples of 8x8x1, 10 classes; 360 to evaluate`."""
    name = "" if data.name == "data" else f"{data.name}, "  # arrays have no name
    classes = f", {data.classes} classes" if data.classes else ""
    test = f"; {_size(data.test):,} to evaluate" if data.test is not None else "; nothing to evaluate"
    return f"{name}{_size(data.train):,} examples of {_shape(data.train.element_spec)}{classes}{test}"


def describe_strategy(strategy: Strategy) -> str:
    """Returns for example `horovod, 2 replicas on 2 GPU devices in 2 processes`."""
    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    kind = next((kind for kind in ("TPU", "GPU") if kind in kinds), "CPU")
    processes = f" in {strategy.cluster.size} processes" if strategy.cluster.size > 1 else ""
    replicas, devices = count_of(strategy.replicas, "replica"), count_of(strategy.devices_in_total, f"{kind} device")
    return f"{strategy.name}, {replicas} on {devices}{processes}"


def describe_optimizer(model: keras.Model, strategy: Strategy) -> str:
    """Returns for example `state sharded over 2 replicas, 215.0 KiB + 214.1 KiB`; empty if it is not sharded."""
    parts = strategy.optimizer_shards.state_bytes(model.optimizer)
    if len(parts) == 1:
        return ""
    return f"state sharded over {len(parts)} replicas, {describe_parts(parts)}"


def _batch(
    strategy: Strategy, settings: Settings, batch_size: int, precision: str, allocation: RowAllocation = EVEN
) -> str:
    """Returns for example `64 examples = 2 replicas x 2 micro-steps x 16, computed in float32`."""
    parts, micro_steps = strategy.batch_parts, strategy.micro_batches or settings.micro_steps
    name = "micro-batches" if strategy.micro_batches else "micro-steps"
    counts = None if allocation is EVEN else allocation.counts(batch_size, strategy.replicas)
    if counts and min(counts) < max(counts):
        summands = " + ".join(map(str, counts))
        rows = summands if len(counts) <= _SHOWN else f"{min(counts)} to {max(counts)} for each replica"
        split = f" = {rows}" + (f", in {micro_steps} micro-steps" if micro_steps > 1 else "")
    elif batch_size % (parts * micro_steps):
        split = f", divided over {parts} replicas" + (f" and {micro_steps} micro-steps" if micro_steps > 1 else "")
    else:
        factors = [(parts, "replicas" if parts == strategy.replicas else "parts"), (micro_steps, name)]
        shown = [f"{count} {factor} x " for count, factor in factors if count > 1]
        split = f" = {''.join(shown)}{batch_size // (parts * micro_steps)}" if shown else ""
    return f"{count_of(batch_size, 'example')}{split}, computed in {precision}"


def _length(plan: RunPlan) -> str:
    """Returns for example `450 steps, 20 epochs`, or `100 steps, 4.45 epochs; 50 steps done before`."""
    epochs = (plan.epoch(plan.total_steps) or 0.0) - plan.first_epoch
    number = int(plan.epoch_text(plan.total_steps).rpartition("/")[2] or 0)
    shown = count_of(number, "epoch") if epochs >= number else f"{epochs:.3g} epochs"
    done = f"; {count_of(plan.first_step, 'step')} done before" if plan.first_step else ""
    return f"{count_of(plan.total_steps, 'step')}, {shown}{done}"


def _size(examples: Examples) -> int:
    return min(examples.size, examples.rows or examples.size)


def _shape(spec: Any) -> str:
    """Returns the shapes of an example's inputs, such as `28x28x1`."""
    inputs = spec[0] if isinstance(spec, tuple | list) else spec
    shapes = ["x".join("?" if n is None else str(n) for n in leaf.shape) or "1" for leaf in tf.nest.flatten(inputs)]
    return ", ".join(shapes[:3]) + (", ..." if len(shapes) > 3 else "")


def _count(variables: Any) -> int:
    return sum(int(np.prod(variable.shape)) for variable in variables)
