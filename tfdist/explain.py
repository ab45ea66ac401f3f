"""Explain the values of a training step (means, sums or rows), and how replicas combine them. Trains nothing."""

import pathlib
import sys
from collections.abc import Sequence

from tfdist.cli import command, early_checks
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.job_config import RunConfig
from tfdist.config.strategy_registry import REFERENCE
from tfdist.config.train_config import TrainConfig
from tfdist.errors import ExitCode, InputError
from tfdist.reporting.plain_reporter import text_table
from tfdist.run import check_script, run_script

_HEADER = ("value", "what it is", "on replicas")


class _StepExplained(BaseException):
    """Ends a program after its step has been explained. Not an `Exception`, because the program might handle that."""


def main(arguments: Sequence[str], config: TrainConfig) -> int:
    """Prints the values of the first step of a script or, without a script, of the model that the flags specify."""
    script = "".join(arguments[:1])
    if script:
        check_script(pathlib.Path(script))
    else:
        early_checks.check_data(config, early_checks.detect_context(config))
    load_tensorflow()  # imported late, after parsing flags
    from tfdist.row_semantics import explanation

    def end(result: explanation.Explanation) -> None:
        table = text_table([_HEADER, *result.rows(all_values=True)])
        print(f"{result.step}:", *table, result.summary, sep="\n", flush=True)
        raise _StepExplained

    try:
        with explanation.using_listener(end):
            _run_script(script, arguments[1:]) if script else _check_model(config)
    except _StepExplained:
        return ExitCode.DONE
    raise InputError(
        f"A script must call fit, evaluate or train_on_batch of a Keras model, or fit of a tfdist.Trainer. Received: {script}, "
        "which ended without such a call."
    )


def _run_script(script: str, arguments: Sequence[str]) -> None:
    from tfdist import keras_fit
    from tfdist.cli.open_strategy import running_strategy

    with running_strategy(RunConfig(strategy=REFERENCE), end_timeout_seconds=0.0) as (config, _, strategy):
        with keras_fit.attach_all(lambda model: keras_fit.DistributedModel(model, strategy, config), strategy):
            run_script(script, arguments)


def _check_model(config: TrainConfig) -> None:
    from tfdist.cli import run

    with run.open_session(config) as session:
        run.make_trainer(session, session.strategy).build(session.data.train)


_EXAMPLES = ("tfdist explain script.py", "tfdist explain --model='mlp(hidden=(64,))' --accumulate_steps=2")

if __name__ == "__main__":
    arguments = "[SCRIPT [ARGUMENTS]]"
    sys.exit(command.run("explain", TrainConfig, main, about=__doc__, arguments=arguments, examples=_EXAMPLES))
