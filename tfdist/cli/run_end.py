"""What a run says at its end: results, where its files are, and what can be done with them."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.reporting import RunDirectory
from tfdist.reporting.run_summary import best_evaluation
from tfdist.reporting.runs_table import duration
from tfdist.reporting.schema import EVAL, main_metrics


def summary(
    directory: RunDirectory,
    records: Sequence[Mapping[str, Any]],
    last: Mapping[str, Any],
    exported: str,
    seconds: float,
    resumes: bool,
    flags: str = "",
) -> list[str]:
    """Returns the lines; the last one is the directory.

    Args:
      directory: directory of the run.
      records: all records of the run.
      last: its last record.
      exported: the best value, if the model is that of its step; else "".
      seconds: wall time since the run was ready to train.
      resumes: whether the run saves checkpoints, from which it could go on.
      flags: what the next commands need to use the same model, such as `--checkpoint=best`.
    """
    metrics = main_metrics(last)
    shown = [name for name in metrics if "accuracy" in name] or [*metrics]
    numbers = "  ".join(f"{name} {float(last[name]):.4f}" for name in ("loss", *shown) if name in last)
    best = exported or _best(records)
    took = f"trained to step {last['step']} in {duration(seconds)}"
    given = " ".join(filter(None, [shlex.quote(str(directory.path)), flags]))
    longer = ["or train longer: the same command with more --epochs or --steps"] if resumes else []
    return [
        f"{last['kind']} after {last['step']} steps: {numbers}",
        f"best {best}; {took}" if best else took,
        f"next: python -m tfdist.evaluate {given}, or tfdist.predict, or tfdist.export",
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
