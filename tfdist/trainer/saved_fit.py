"""One call of `Trainer.fit` on a built model: the fit loop, watched and saved in checkpoints."""

import dataclasses
from collections.abc import Sequence

import keras

from tfdist.checkpoint.manager import Checkpoints, saver
from tfdist.checkpoint.replication import Saved
from tfdist.checkpoint.run_variables import RunVariables
from tfdist.config.balance import Balance
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.reporting import synchronizer
from tfdist.synchronization.federated import owned_by_clients
from tfdist.trainer.balancing import balancing
from tfdist.trainer.callbacks import check_callback_weights, check_no_swap
from tfdist.trainer.early_stopping import watched
from tfdist.trainer.fit_arguments import FitArguments
from tfdist.trainer.fit_loop import FitLoop
from tfdist.trainer.options import Checks, Reporting, Schedule
from tfdist.trainer.program import Program
from tfdist.trainer.records import History
from tfdist.trainer.train_state import TrainState


def run_variables(program: Program, state: TrainState) -> RunVariables:
    """Returns all variables of a run, once no exchange changes them."""
    program.exchanges.settle()
    return RunVariables(program.model, program.strategy, program.store, state.callbacks, program.exchanges)


def saved(program: Program, state: TrainState, batches: BatchSchedule, copied: bool = True) -> Saved:
    """Returns the current state, for a checkpoint; every process must call it.

    Args:
      program: what is trained.
      state: state of the run.
      batches: the run's batches.
      copied: whether training may continue while it is written; otherwise it need not be copied.
    """
    variables = run_variables(program, state)
    variables.collect()
    callbacks, arrays = state.callbacks.save()
    values = {
        **state.values(batches),
        "compression": dict(program.steps.overrides),
        "all_reduce_table": program.steps.all_reduce_table,
        "replicas": program.strategy.replicas,
        "strategy": program.strategy.name,
        "order": variables.order,
        "exchanges": program.exchanges.to_json(),
        "callbacks": callbacks,
    }
    best = [state.best.best.step] if state.best and state.best.best else []
    return Saved(state.step, program.settings.seed, [*variables.parts(copied), *arrays], values, variables, kept=best)


def fit(
    program: Program,
    state: TrainState,
    given: FitArguments,
    batches: BatchSchedule,
    *,
    callbacks: Sequence[keras.callbacks.Callback],
    schedule: Schedule,
    checks: Checks,
    reporting: Reporting,
    checkpoints: Checkpoints | None,
    balance: Balance,
) -> History:
    """Trains a built model; every process must call it.

    Args:
      program: what is trained.
      state: state with which training continues.
      given: data and length of the run.
      batches: the batches of the run.
      callbacks: Keras callbacks, the same on every process.
      schedule: what happens at which step.
      checks: what is measured and checked.
      reporting: where the run is recorded.
      checkpoints: where and how often to save it; None for never.
      balance: how rows are allocated to replicas.
    """
    check_no_swap(callbacks, program)
    check_callback_weights(callbacks, program)
    strategy, settings = program.strategy, program.settings
    train = owned_by_clients(settings.sync, given.data.train, given.batch_size, settings.seed)
    data = dataclasses.replace(given.data, train=train)
    copied = checkpoints is None or checkpoints.in_background
    state.best = watched(callbacks, checkpoints, program, state.best_before, evaluates=data.test is not None)
    with (
        checks.watchdog(strategy.group) as watchdog,
        saver(
            checkpoints,
            strategy,
            state.step,
            lambda: saved(program, state, batches, copied),
            synchronizer(reporting.ledger, reporting.reporter),
            state.best,
        ) as saving,
    ):
        loop = FitLoop(
            program,
            state,
            data,
            batches,
            batches.end(given.steps, given.epochs, data.train.size),
            given.numbered,
            callbacks=callbacks,
            schedule=schedule,
            checks=checks,
            reporting=reporting,
            saving=saving,
            checkpoints=checkpoints,
            balancing=balancing(balance, strategy, state, batches.position.batch_size),
            watchdog=watchdog,
            replicated=lambda: run_variables(program, state).replicated(),
        )
        try:
            return loop.run()
        finally:
            state.end_run(batches, data.train.size)
