"""One call of `Trainer.fit` on a built model: the fit loop, watched and saved."""

import dataclasses
from collections.abc import Sequence

import keras

from tfdist.checkpoint.manager import Checkpoints, saver
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.grammar.balance import Balance
from tfdist.reporting import synchronizer
from tfdist.step.settings import Settings
from tfdist.synchronization.federated import owned_by_clients
from tfdist.trainer.balancing import balancing
from tfdist.trainer.callback_weights import check_callback_weights, check_no_swap
from tfdist.trainer.checkpoint_contents import run_variables, saved
from tfdist.trainer.fit_arguments import FitArguments
from tfdist.trainer.fit_loop import FitLoop
from tfdist.trainer.history import History
from tfdist.trainer.monitored import watched
from tfdist.trainer.options import Checks, Reporting, Schedule
from tfdist.trainer.program import Program
from tfdist.trainer.train_state import TrainState


def _with_clients(given: FitArguments, settings: Settings, schedule: Schedule, balance: Balance) -> FitArguments:
    """Returns the arguments with the training examples as clients own them, if `sync` has clients.

    Raises:
      InputError: the examples cannot be divided among clients.
    """
    train = owned_by_clients(
        settings.sync, given.data.train, given.batch_size, settings.seed, schedule.elastic_batch, balance.kind
    )
    return given._replace(data=dataclasses.replace(given.data, train=train))


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
    given = _with_clients(given, program.settings, schedule, balance)
    strategy, data = program.strategy, given.data
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
