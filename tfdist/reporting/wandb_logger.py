"""Logs a run to Weights & Biases, by the package wandb, which is imported when the logger is created."""

from collections.abc import Mapping
from pathlib import Path

from tfdist.reporting.logger import LoggedRun, Logger

_TRACKER = "wandb"


class WandbLogger(Logger):
    """Logs flags as config, and the numbers of records; a resumed run continues the same W&B run.

    `WANDB_MODE=offline` writes to the directory `wandb` of the run, for `wandb sync`.

    Args:
      run: the run.
      project: name of the project.
      entity: user or team; by default as W&B chooses.
      mode: online, offline or disabled; by default as W&B chooses, which `WANDB_MODE` sets.
    """

    def __init__(self, run: LoggedRun, project: str = "tfdist", entity: str | None = None, mode: str | None = None):
        import wandb

        path = run.directory.path
        self._run = wandb.init(
            project=project,
            entity=entity,
            mode=mode,
            id=run.external_id(_TRACKER) or None,
            resume="allow",
            name=run.name,
            dir=str(path) if isinstance(path, Path) else None,
            config=dict(run.flags),
            tags=[f"{key}:{value}"[:64] for key, value in run.tags.items() if key != "directory"],
            settings=wandb.Settings(silent=True),
        )
        run.store_external_id(_TRACKER, self._run.id)
        # Not W&B's own step, which may not decrease: a resumed run repeats the steps since its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See base class."""
        self._run.log({"step": step, **values})

    def close(self, outcome: str) -> None:
        """See base class."""
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome == "done" else 1)
