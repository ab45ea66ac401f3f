"""Contents of a run's checkpoints: the state of a `Program` and of its `TrainState`."""

from tfdist.checkpoint.run_variables import RunVariables
from tfdist.checkpoint.tiers import Saved
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.trainer.program import Program
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
