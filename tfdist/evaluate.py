"""Evaluate the model of a run on its data set or another one, with any strategy."""

import json
import sys

from tfdist.cli import command, weights
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.trained_config import EvaluateConfig
from tfdist.storage import path_of


def main(run: str, config: EvaluateConfig) -> int:
    """Prints the loss and the metrics, and writes them if requested; returns the exit code."""
    weights.sources(run, config.checkpoint)  # reports errors without delay
    if config.output:
        weights.check_output(config.output)
    load_tensorflow()  # imported late, after parsing flags
    from tfdist.cli import trained_run
    from tfdist.reporting.plain_reporter import format_number
    from tfdist.reporting.schema import to_json

    with trained_run.open_run(run, config) as model:
        examples = model.examples(config.split)
        results = model.trainer.evaluate(examples, batch_size=model.batch_size)
        if model.trainer.strategy.is_chief:
            description = model.describe(config.split)
            values = "  ".join(f"{name} {format_number(value)}" for name, value in results.items())
            step = "" if model.step is None else f" after {model.step} steps"
            print(f"eval{step}: {values}")
            print(
                f"{model.source}  {description['dataset']}: {examples.size} examples, by {description['strategy']} "
                f"(replicas: {description['replicas']})"
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
