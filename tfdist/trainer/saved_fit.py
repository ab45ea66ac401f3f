"""A call of `Trainer.fit` on a built model: the fit loop with its watchdog and checkpoints."""

import dataclasses
from collections.abc import Sequence

import keras

from tfdist.checkpoint.best import BestTracker
from tfdist.checkpoint.manager import open_saver
from tfdist.checkpoint.replication import RunSnapshot
from tfdist.config.balance import MEASURED, Balance
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.reporting.reporter import synchronizer
from tfdist.step.row_dependence import log_no_effect
from tfdist.synchronization.federated import divide_among_clients
from tfdist.trainer.balancing import make_balancing
from tfdist.trainer.callbacks import check_callback_weights, check_no_swap
from tfdist.trainer.early_stopping import check_monitored_metrics
from tfdist.trainer.fit_arguments import FitArguments
from tfdist.trainer.fit_loop import FitLoop
from tfdist.trainer.options import FitOptions
from tfdist.trainer.program import Program
from tfdist.trainer.records import History
from tfdist.trainer.train_state import TrainState


def run_snapshot(program: Program, state: TrainState, batches: BatchSchedule, copied: bool = True) -> RunSnapshot:
    """Returns the current state for a checkpoint; every process must call it.

    Without `copied`, training must wait until the checkpoint is written.
    """
    variables = program.run_variables(state.callbacks)
    variables.collect()
    callbacks, arrays = state.callbacks.save()
    values = {
        **state.values(batches),
        "compression": dict(program.steps.overrides),
        "all_reduce_table": program.steps.all_reduce_table,
        "replicas": program.strategy.replicas,
        "strategy": program.strategy.name,
        "order": variables.order,
        "exchanges": program.synchronizer.to_json(),
        "callbacks": callbacks,
    }
    best_steps = [state.best_tracker.best.step] if state.best_tracker and state.best_tracker.best else []
    return RunSnapshot(
        state.step, program.settings.seed, [*variables.parts(copied), *arrays], values, variables, keep_steps=best_steps
    )


def fit(
    program: Program,
    state: TrainState,
    arguments: FitArguments,
    batches: BatchSchedule,
    *,
    callbacks: Sequence[keras.callbacks.Callback],
    options: FitOptions,
    balance: Balance,
) -> History:
    """Trains a built model; every process must call it."""
    check_no_swap(callbacks, program)
    check_callback_weights(callbacks, program)
    strategy, settings, checkpoints = program.strategy, program.settings, options.checkpoints
    train = divide_among_clients(settings.sync, arguments.data.train, arguments.batch_size, settings.seed)
    data = dataclasses.replace(arguments.data, train=train)
    copied = checkpoints is None or checkpoints.in_background
    if balance.kind == MEASURED and program.metrics.division == "whole":
        log_no_effect(f"--balance={balance}", program.model, program.dependence.reasons[0], strategy)
        balance = Balance()
    best_metric = check_monitored_metrics(
        callbacks, checkpoints.best if checkpoints else "", program, data.test is not None
    )
    state.best_tracker = (
        BestTracker(checkpoints.directory, *best_metric, state.initial_best)
        if checkpoints and checkpoints.best
        else None
    )
    with (
        options.checks.watchdog(strategy.group) as watchdog,
        open_saver(
            checkpoints,
            strategy,
            state.step,
            lambda: run_snapshot(program, state, batches, copied),
            synchronizer(options.reporting.ledger, options.reporting.reporter),
            state.best_tracker,
        ) as run_saver,
    ):
        loop = FitLoop(
            program,
            state,
            arguments._replace(data=data),
            batches,
            callbacks=callbacks,
            options=options,
            saver=run_saver,
            balancing=make_balancing(balance, strategy, state, batches.position.batch_size),
            watchdog=watchdog,
        )
        try:
            return loop.run()
        finally:
            state.end_run(batches, data.train.size)
