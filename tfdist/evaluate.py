"""Evaluate the model of a run on its data set or another one, with any strategy."""

import json
import sys
from typing import Any

from tfdist.cli import command, flags, tensorflow_import, weights
from tfdist.config.trained_config import EvaluateConfig
from tfdist.storage import path_of


def main(run: str, config: EvaluateConfig) -> int:
    """Prints the loss and the metrics, and writes them if requested; returns the exit code."""
    weights.sources(run, config.checkpoint)  # reports errors without delay
    if config.output:
        weights.check_output(config.output)
    tensorflow_import.load_tensorflow()  # imported late, so that flags are parsed and help is printed before
    from tfdist.cli import trained_run
    from tfdist.reporting.plain_reporter import rounded
    from tfdist.reporting.schema import to_json

    with trained_run.open_run(run, config) as trained:
        examples = trained.examples(config.split)
        results = trained.trainer.evaluate(examples, batch_size=trained.batch_size)
        if trained.trainer.strategy.is_chief:
            description = trained.describe(config.split)
            values = "  ".join(f"{name} {rounded(value)}" for name, value in results.items())
            step = "" if trained.step is None else f" after {trained.step} steps"
            print(f"eval{step}: {values}")
            print(
                f"{trained.source}  {description['dataset']}: {examples.size} examples, by {description['strategy']} "
                f"(replicas: {description['replicas']})"
            )
            if config.output:
                text = json.dumps(to_json({**description, "results": results}), indent=2, allow_nan=False)
                weights.write_output(path_of(config.output), f"{text}\n".encode())
                print(path_of(config.output))
    return 0


def _run(values: Any, arguments: list[str]) -> int:
    run = command.only_argument(arguments, "tfdist evaluate takes one directory.", "Give the directory of a run.")
    return main(run, flags.config(values, EvaluateConfig))


def _define(values: Any) -> None:
    values.set_gnu_getopt(True)  # flags may follow the directory
    flags.define(values, EvaluateConfig)


_EXAMPLES = (
    "tfdist evaluate runs/one --output=results.json",
    "tfdist launch --processes=2 -- tfdist evaluate runs/one --split=train",
)

if __name__ == "__main__":
    sys.exit(command.run("evaluate", _define, _run, about=__doc__ or "", arguments="RUN", examples=_EXAMPLES))
