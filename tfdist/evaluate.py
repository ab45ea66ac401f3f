"""Evaluate the model of a run on its dataset or another one, with any strategy."""

import json
import sys

from tfdist.cli import command, weights
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.trained_config import EvaluateConfig
from tfdist.errors import count_of
from tfdist.storage import path_of


def main(run: str, config: EvaluateConfig) -> int:
    """Prints the loss and the metrics, and writes them if requested; returns the exit code."""
    weights.weight_files(run, config.checkpoint)  # reports errors before TensorFlow is loaded
    if config.output:
        weights.check_output(config.output)
    load_tensorflow()  # imported late, after parsing flags
    from tfdist.cli.trained_run import open_run
    from tfdist.reporting.plain_reporter import format_number
    from tfdist.reporting.schema import to_json

    with open_run(run, config) as trained_run:
        examples = trained_run.examples(config.split)
        results = trained_run.trainer.evaluate(examples, batch_size=trained_run.batch_size)
        if trained_run.trainer.strategy.is_chief:
            description = trained_run.describe(config.split)
            values = "  ".join(f"{name} {format_number(value)}" for name, value in results.items())
            step = "" if trained_run.step is None else f" after {trained_run.step} steps"
            print(f"eval{step}: {values}")
            print(
                f"{trained_run.source}  {description['dataset']}: {examples.size} examples, evaluated with "
                f"{description['strategy']} on {count_of(description['replicas'], 'replica')}"
            )
            if config.output:
                text = json.dumps(to_json({**description, "results": results}), indent=2, allow_nan=False)
                weights.write_output(path_of(config.output), f"{text}\n".encode())
                print(path_of(config.output))
    return 0


_EXAMPLES = (
    "tfdist evaluate runs/one --output=results.json",
    "tfdist launch --processes=2 -- tfdist evaluate runs/one --split=train",
)

if __name__ == "__main__":
    sys.exit(command.run("evaluate", EvaluateConfig, main, about=__doc__, arguments="RUN", examples=_EXAMPLES))
