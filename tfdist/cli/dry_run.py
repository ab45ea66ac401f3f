"""What `--dry_run` prints: the flags of a run, and how its batch and steps are divided."""

import dataclasses
from collections.abc import Iterable

from tfdist.cli import flags, open_strategy
from tfdist.cli.session import Session
from tfdist.data import rows, steps_in_epochs
from tfdist.trainer.trainer import Trainer


def describe(session: Session, trainer: Trainer) -> None:
    """Prints a description of a run on the chief; every process must call it.

    Args:
      session: the run's strategy and data.
      trainer: a built trainer.
    """
    config, strategy = session.config, session.strategy
    hosts = open_strategy.hosts(strategy)
    if not strategy.is_chief:
        return
    size = session.data.train.size
    trainer.batch_schedule(size, batch_size=config.batch_size, elastic_batch=config.elastic_batch)
    parts = strategy.batch_parts
    shares = _span(rows(config.batch_size, r, parts)[1] for r in range(parts))
    micro = parts * config.accumulate_steps
    steps = config.steps or steps_in_epochs(config.epochs, size, config.batch_size)
    print(flags.flags_text(dataclasses.replace(config, strategy=session.detection.strategy)), end="")
    lines = {
        "strategy": session.detection.reason,
        "processes": f"{strategy.cluster.size} on {', '.join(dict.fromkeys(hosts))}",
        "replicas": str(parts),
        "global batch": f"{config.batch_size} examples",
        "per replica": f"{shares} examples",
        "per micro-step": f"{_span(rows(config.batch_size, r, micro)[1] for r in range(micro))} examples, "
        f"{config.accumulate_steps} per step",
        "training set": f"{size} examples",
        "test set": f"{session.data.test.size} examples" if session.data.test else "none",
        "steps": f"{steps} ({steps * config.batch_size / size:.2f} epochs)",
        "parameters": f"{trainer.model.count_params():,}",
    }
    for name, value in lines.items():
        print(f"{name:>15}: {value}")


def _span(numbers: Iterable[int]) -> str:
    """Returns equal or nearly equal numbers as text."""
    return " or ".join(str(number) for number in sorted(set(numbers)))
