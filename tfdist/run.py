"""Run a Keras script unchanged on all devices or processes: its fit, evaluate and predict are distributed."""

import os
import pathlib
import runpy
import sys
from collections.abc import Sequence

from tfdist.cli import command, early_checks
from tfdist.cluster.exit_status import message_with_location
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.job_config import RunConfig
from tfdist.errors import ExitCode, InputError, naming_flags


def main(arguments: Sequence[str], config: RunConfig) -> int:
    """Runs a script with its arguments, and distributes its models when it calls their methods; returns the exit code."""
    if not arguments:
        raise InputError("The script must follow the flags: tfdist run --strategy=auto script.py ...")
    script, *script_arguments = arguments
    check_script(pathlib.Path(script))
    context = early_checks.check_cluster(config, early_checks.detect_context(config))
    load_tensorflow()  # imported late, after parsing flags
    import keras

    from tfdist import keras_fit
    from tfdist.cli import open_strategy
    from tfdist.cli.run import warn_about_flags

    if config.precision != "float32":
        keras.config.set_dtype_policy(config.precision)
    with open_strategy.running_strategy(config, context, config.stall_shutdown_seconds) as (config, _, strategy):
        warn_about_flags(config, strategy)
        keras.utils.set_random_seed(config.seed)
        with (
            strategy.in_use(),
            keras_fit.attach_all(lambda model: keras_fit.DistributedModel(model, strategy, config), strategy),
        ):
            run_script(script, script_arguments)
    return ExitCode.DONE


def check_script(script: pathlib.Path) -> None:
    """Raises `InputError` unless a file is a Python program, before TensorFlow is imported."""
    if not os.path.isfile(script):  # `pathlib.Path.is_file` raises if the directory is not accessible
        raise InputError(f"The script must be a file. Received: {script}.")
    if script.suffix == ".ipynb":
        raise InputError(
            f"The script must be a Python program. Received: {script}, a notebook. Convert it: jupyter nbconvert --to script."
        )
    if script.suffix in (".pyc", ".pyz", ".zip"):  # compiled programs and archives
        return
    try:
        compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError) as error:  # null bytes raise ValueError
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        problem = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InputError(f"The script must be a Python program. Received: {script}{line}: {problem}.") from error


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a file like `python script arguments`; raises its errors, but not a successful `SystemExit`.

    A script must join the threads in which it trains.
    """
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    try:
        with naming_flags(False):
            runpy.run_path(script, run_name="__main__")
    except InputError as error:
        error.args = (message_with_location(error), *error.args[1:])
        raise
    except SystemExit as end:
        if end.code is not None and end.code != 0:
            raise


_EXAMPLES = (
    "tfdist run --strategy=mirrored --devices=2 script.py",
    "tfdist launch --processes=2 -- tfdist run --compression=fp16 script.py",
)

if __name__ == "__main__":
    sys.exit(
        command.run(
            "run",
            RunConfig,
            main,
            lambda: [sys.argv[0], *command.environment_flags(), *sys.argv[1:]],
            about=__doc__.partition(":")[0] + ".",
            arguments="SCRIPT [ARGUMENTS]",
            examples=_EXAMPLES,
        )
    )
