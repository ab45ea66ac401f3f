"""Output of `--dry_run`: the flags of a run, and the division of its batch and steps."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.cli import flags, open_strategy
from tfdist.cli.output import Output
from tfdist.cli.run import Session
from tfdist.data import rows, steps_in_epochs
from tfdist.data.row_partition import apportion
from tfdist.trainer.trainer import Trainer


def describe(session: Session, trainer: Trainer, output: Output) -> None:
    """Prints a description of a run on the chief; every process must call it. The trainer must be built."""
    config, strategy = session.config, session.strategy
    hosts = open_strategy.hosts(strategy)
    if not strategy.is_chief:
        return
    size = session.data.train.size
    trainer.batch_schedule(size, batch_size=config.batch_size, elastic_batch=config.elastic_batch)
    parts = strategy.batch_parts
    micro_steps = strategy.micro_batches or config.accumulate_steps
    weights = config.parsed.balance.weights
    equal_counts = [rows(config.batch_size, part, parts)[1] for part in range(parts)]
    replica_rows = apportion(config.batch_size, weights) if weights else equal_counts
    steps = config.steps or steps_in_epochs(config.epochs, size, config.batch_size)
    facts = {
        "flags": dataclasses.asdict(config),
        "strategy": config.strategy,
        "reason": session.detection.reason,
        "processes": strategy.cluster.size,
        "hosts": hosts,
        "replicas": parts,
        "global_batch_examples": config.batch_size,
        "replica_batch_examples": sorted(set(replica_rows)),
        "micro_batch_examples": _shares(replica_rows, micro_steps),
        "micro_steps_per_step": micro_steps,
        "training_examples": size,
        "test_examples": session.data.test.size if session.data.test else None,
        "steps": steps,
        "epochs": steps * config.batch_size / size,
        "parameters": trainer.model.count_params(),
    }
    output.line(flags.flags_text(config).removesuffix("\n"))
    for name, value in _format_facts(facts).items():
        output.line(f"{name:>15}: {value}")
    output.result(facts)


def _format_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {
        "strategy": facts["reason"],
        "processes": f"{facts['processes']} on {', '.join(dict.fromkeys(facts['hosts']))}",
        "replicas": str(facts["replicas"]),
        "global batch": f"{facts['global_batch_examples']} examples",
        "per replica": f"{_join_with_or(facts['replica_batch_examples'])} examples",
        "per micro-step": f"{_join_with_or(facts['micro_batch_examples'])} examples, {facts['micro_steps_per_step']} per step",
        "training set": f"{facts['training_examples']} examples",
        "test set": "none" if facts["test_examples"] is None else f"{facts['test_examples']} examples",
        "steps": f"{facts['steps']} ({facts['epochs']:.2f} epochs)",
        "parameters": f"{facts['parameters']:,}",
    }


def _shares(counts: Sequence[int], micro_steps: int) -> list[int]:
    """Returns the distinct numbers of rows in a micro-step of any replica, in ascending order."""
    parts = [rows(count, part, micro_steps)[1] for count in counts for part in range(min(micro_steps, count))]
    return sorted(set(parts))


def _join_with_or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
