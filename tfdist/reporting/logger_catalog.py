"""The loggers of a run by name, as in `--loggers=tensorboard,mlflow(experiment='mine')`."""

import importlib.util
import inspect
from collections.abc import Callable, Sequence

from tfdist.config.spec import Spec, call, load_object
from tfdist.errors import InputError
from tfdist.errors.formatting import nearest
from tfdist.reporting.experiment_trackers import MLflowLogger, WandbLogger
from tfdist.reporting.logger import LoggedRun, OptionalReporter
from tfdist.reporting.reporter import Reporter
from tfdist.reporting.tensorboard import TensorBoardReporter

TENSORBOARD = "tensorboard"
# The module that a logger needs, and the command that installs it.
_REQUIREMENTS = {"mlflow": ("mlflow", "pip install mlflow-skinny"), "wandb": ("wandb", "pip install wandb")}
CATALOG: dict[str, Callable[..., Reporter]] = {
    TENSORBOARD: lambda run: TensorBoardReporter(run.directory.tensorboard),
    "mlflow": MLflowLogger,
    "wandb": WandbLogger,
}


def check_installed(loggers: Sequence[Spec]) -> None:
    """Checks that the packages that loggers need are installed, without importing them, and the arguments of known loggers.

    Raises:
      InputError: a package is missing, and the message has the command that installs it; or an argument is unknown.
    """
    for spec in loggers:
        if spec.name in CATALOG:
            known = [name for name in inspect.signature(CATALOG[spec.name]).parameters if name != "run"]
            if unknown := next((name for name in spec.args if name not in known), ""):
                raise InputError(
                    f'--loggers={spec}: {spec.name} has no parameter "{unknown}". Received: {spec}.{nearest(unknown, known)}'
                )
        module, install = _REQUIREMENTS.get(spec.name, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            raise InputError(
                f"--loggers={spec.name} needs the package {module}. Received: an environment without it. Run: {install}."
            )


def check_own(loggers: Sequence[Spec]) -> None:
    """Imports user-defined loggers, so that errors in their names are reported before a run begins."""
    for spec in loggers:
        if ":" in spec.name:
            load_object(spec.name)


def make_loggers(loggers: Sequence[Spec], run: LoggedRun) -> list[Reporter]:
    """Creates the loggers of a run, on the chief.

    TensorBoard's events are files of the run, so that an error in writing them ends the run like one in any other file; an
    error of another logger is only a warning.

    Raises:
      InputError: a logger does not take its arguments.
    """
    return [_make_logger(spec, run) for spec in loggers]


def _make_logger(spec: Spec, run: LoggedRun) -> Reporter:
    def make() -> Reporter:
        logger = call(CATALOG[spec.name] if spec.name in CATALOG else load_object(spec.name), spec, run=run)
        if not isinstance(logger, Reporter):
            raise InputError(
                f"--loggers={spec} must be a class or function that makes a tfdist.reporting.Reporter. Received: "
                f"{type(logger).__name__}. Derive it from tfdist.reporting.Logger."
            )
        return logger

    return make() if spec.name == TENSORBOARD else OptionalReporter(spec.name, make)
