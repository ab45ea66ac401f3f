"""The run of `tfdist train` at its end: its model, results, where its files are, and what can be done with them."""

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfdist.checkpoint.best import Best
from tfdist.checkpoint.manager import Checkpoints
from tfdist.cli.resume import OF_THE_END
from tfdist.config.fields import names, refused_of_run
from tfdist.config.train_config import TrainConfig
from tfdist.grammar.interval import parse_period
from tfdist.reporting import RunDirectory
from tfdist.reporting.file_errors import must_write
from tfdist.reporting.run_summary import best_evaluation
from tfdist.reporting.runs_table import duration
from tfdist.reporting.schema import EVAL, main_metrics
from tfdist.trainer.options import Reporting
from tfdist.trainer.trainer import Trainer


class Run(NamedTuple):
    """A run whose state has been restored and whose directory is open.

    Attributes:
      directory: directory of the run.
      is_chief: whether this process writes to it, besides its own log and ledger.
      checkpoints: how the run is saved.
      reporting: where it is recorded.
      began: `time.monotonic()` when it was ready to train.
    """

    directory: RunDirectory
    is_chief: bool
    checkpoints: Checkpoints
    reporting: Reporting
    began: float

    def finish(
        self, trainer: Trainer, config: TrainConfig, callbacks: Sequence[keras.callbacks.Callback]
    ) -> Best | None:
        """Writes the trained model, and that the run has finished; every process must call it.

        Returns:
          The best value, if the model is that of its step; else None.
        """
        reasons = [getattr(callback, "reason", "") for callback in callbacks]  # may be an attribute of a user's own
        reason = next((reason for reason in reasons if reason and isinstance(reason, str)), "")
        step, best = trainer.step, trainer.load_best() if trainer.best else None
        with must_write(self.directory.model):
            trainer.save(self.directory.model)
        if self.is_chief:
            asked = {name: getattr(config, name) for name in ("steps", "epochs", *OF_THE_END)}
            with must_write(self.directory.end):
                self.directory.finish({"step": step, "model_step": trainer.step, "reason": reason, **asked})
        return best

    @property
    def resumes(self) -> bool:
        """Whether the run saves checkpoints, from which it could be continued."""
        return bool(self.checkpoints.best) or any(parse_period(self.checkpoints.every))

    def print_summary(self, best: Best | None, config: TrainConfig) -> None:
        """Prints the results, what to do next, and the directory, on the chief."""
        if self.is_chief:
            flags = ["--checkpoint=best"] if best else []
            left_out = {"strategy", *names(config, "training_only"), *names(config, "is_option")}
            flags += [] if left_out.issuperset(refused_of_run(config)) else ["--safe_mode=false"]
            print(*summary(self, self.directory.records(), best, " ".join(flags)), sep="\n", flush=True)


def summary(run: Run, records: Sequence[Mapping[str, Any]], best: Best | None, flags: str = "") -> list[str]:
    """Returns the lines; the last one is the directory.

    Args:
      run: the run, which has ended.
      records: all of its records.
      best: the best value, if the model is that of its step; else None.
      flags: what the next commands need to use the same model, such as `--checkpoint=best`.
    """
    directory, last = run.directory, records[-1]
    metrics = main_metrics(last)
    shown = [name for name in metrics if "accuracy" in name] or [*metrics]
    numbers = "  ".join(f"{name} {float(last[name]):.4f}" for name in ("loss", *shown) if name in last)
    value = f"{best}, exported as {directory.model.name}" if best else _best(records)
    took = f"trained to step {last['step']} in {duration(time.monotonic() - run.began)}"
    given = " ".join(filter(None, [shlex.quote(str(directory.path)), flags]))
    longer = ["or train longer: the same command with more --epochs or --steps"] if run.resumes else []
    return [
        f"{last['kind']} after {last['step']} steps: {numbers}",
        f"best {value}; {took}" if value else took,
        f"next: tfdist evaluate {given}, or tfdist predict, or tfdist export",
        *longer,
        f"{directory.model.name}, {directory.curves.name}, {directory.metrics.name} and {directory.logs.name} are in",
        str(directory.path),
    ]


def _best(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the best evaluated value of the first metric, or of the loss if there is none; "" for one evaluation."""
    evaluations = [record for record in records if record["kind"] == EVAL]
    if len(evaluations) < 2:
        return ""
    metric = next(iter(main_metrics(evaluations[-1])), "loss")
    found = best_evaluation(evaluations, metric)
    return f"{metric} {found[1]:.4f} at step {found[0]}" if found else ""
