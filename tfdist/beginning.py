"""How a run begins in its directory: anew, or where it stopped; and who may write there."""

import contextlib
import dataclasses
import json
import sys
from typing import Any, NamedTuple

from tfdist import flags, opening
from tfdist.checkpoint import clean_partial, lock
from tfdist.config import TrainConfig
from tfdist.errors import InputError
from tfdist.reporting import LedgerFile, NullLedger, NullReporter, Reporter, RunDirectory, chief_reporter
from tfdist.resuming import Origin
from tfdist.resuming import origin as decided
from tfdist.saving import Checkpoints
from tfdist.strategy import Strategy
from tfdist.trainer import Trainer


class Begun(NamedTuple):
    """A run whose state and whose directory are ready.

    Attributes:
      checkpoint: where the state comes from; empty for step 0.
      checkpoints: how the run is saved.
      ledger: gets the examples that this process uses.
      earlier: what was recorded before.
    """

    checkpoint: str
    checkpoints: Checkpoints
    ledger: LedgerFile | NullLedger
    earlier: list[dict[str, Any]]

    def reporter(self, directory: RunDirectory, strategy: Strategy) -> Reporter:
        """What the run reports to, on the chief."""
        return chief_reporter(directory, sys.stderr, self.earlier) if strategy.is_chief else NullReporter()


def origin(config: TrainConfig, directory: RunDirectory, strategy: Strategy) -> Origin:
    """What the run begins with, on every process the same; nothing is written.

    Raises:
      InputError: see `tfdist.resuming.origin`; on the chief.
    """
    found = decided(config.resume, directory, dataclasses.asdict(config)) if strategy.is_chief else None
    return Origin(*strategy.group.broadcast("origin", found))


def begin(
    origin: Origin,
    trainer: Trainer,
    examples: int,
    config: TrainConfig,
    directory: RunDirectory,
    stack: contextlib.ExitStack,
) -> Begun:
    """Gives the trainer its state and makes the directory ready; every process calls it.

    Args:
      origin: what to begin with.
      trainer: built.
      examples: of an epoch.
      config: of the run.
      directory: of the run.
      stack: keeps the directory this run's own, and its files open, until it is closed.

    Raises:
      InputError: a checkpoint is of another model, another process writes in the directory, or it cannot be written.
    """
    strategy = trainer.strategy
    hosts = opening.hosts(strategy)
    if strategy.is_chief:
        directory.make()
        stack.enter_context(lock(directory.path))
        clean_partial(directory.checkpoints)
    step = trainer.resume_from(origin.checkpoints)
    checkpoint = trainer.resumed_from
    start = 0
    if strategy.is_chief:
        start = directory.begin(
            flags.flags_text(config),
            hosts,
            step=step,
            checkpoint=checkpoint,
            facts={
                "strategy": strategy.name,
                "replicas": strategy.replicas,
                "batch_size": config.batch_size,
                "examples": examples,
                "ledgers": _ledgers(config, strategy),
            },
        )
    start = strategy.group.broadcast("output_dir/made", start)
    _check_shared(config, directory, strategy)
    saved = Checkpoints(
        directory=str(directory.checkpoints),
        every=config.checkpoint_every,
        keep=config.keep,
        in_background=config.checkpoint_async,
        strict=config.checkpoint_strict,
        flags=dataclasses.asdict(config),
    )
    keeps = strategy.cluster.rank < _ledgers(config, strategy)
    ledger = LedgerFile(directory.ledger(start, strategy.cluster.rank)) if keeps else NullLedger()
    stack.callback(ledger.close)
    return Begun(checkpoint, saved, ledger, directory.records())


def _ledgers(config: TrainConfig, strategy: Strategy) -> int:
    """How many processes keep a ledger: all, but for a mesh, where each has all examples."""
    if config.checkpoint_every == "0":
        return 0
    return 1 if strategy.global_view else strategy.cluster.size


def _check_shared(config: TrainConfig, directory: RunDirectory, strategy: Strategy) -> None:
    """All processes write to a checkpoint, and all must see it."""
    sees = strategy.group.gather("output_dir/seen", directory.is_run)
    if config.checkpoint_every != "0" and not all(sees):
        ranks = [str(rank) for rank, seen in enumerate(sees) if not seen]
        raise InputError(
            "Checkpoints need an output directory that all processes share. Received: "
            f"{json.dumps(str(directory.path))}, which is not there for rank {', '.join(ranks)}. Give another --output_dir."
        )
