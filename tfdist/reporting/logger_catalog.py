"""The loggers of a run by name, as in `--loggers=tensorboard,mlflow(experiment='mine')`."""

import importlib.util
import inspect
from collections.abc import Callable, Sequence

from tfdist.config.spec import Spec, call, load_object
from tfdist.errors import InputError
from tfdist.errors.suggestions import nearest
from tfdist.reporting.logger import LoggedRun, OptionalReporter
from tfdist.reporting.mlflow_logger import MLflowLogger
from tfdist.reporting.reporter import Reporter
from tfdist.reporting.tensorboard import TensorBoardReporter
from tfdist.reporting.wandb_logger import WandbLogger

TENSORBOARD = "tensorboard"
# The module that a logger needs, and the command that installs it.
_NEEDED = {"mlflow": ("mlflow", "pip install mlflow-skinny"), "wandb": ("wandb", "pip install wandb")}


def check_installed(loggers: Sequence[Spec]) -> None:
    """Checks that the packages of loggers are installed, without importing them, and the arguments of known loggers.

    Raises:
      InputError: one is not, and the message has the command that installs it; or an argument is unknown.
    """
    for spec in loggers:
        if spec.name in CATALOG:
            known = [name for name in inspect.signature(CATALOG[spec.name]).parameters if name != "run"]
            if unknown := next((name for name in spec.args if name not in known), ""):
                raise InputError(
                    f'--loggers={spec}: {spec.name} has no parameter "{unknown}". Received: {spec}.{nearest(unknown, known)}'
                )
        module, install = _NEEDED.get(spec.name, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            raise InputError(
                f"--loggers={spec.name} needs the package {module}. Received: an environment without it. Run: {install}."
            )


def check_own(loggers: Sequence[Spec]) -> None:
    """Imports a user's own loggers, so that what is wrong with their names is reported before a run begins."""
    for spec in loggers:
        if ":" in spec.name:
            load_object(spec.name)


def make_loggers(loggers: Sequence[Spec], run: LoggedRun) -> list[Reporter]:
    """Creates the loggers of a run, on the chief.

    TensorBoard's events are files of the run, so that an error of writing them ends the run like that of any other file;
    an error of another logger is only a warning.

    Raises:
      InputError: a logger does not take its arguments.
    """
    return [_made(spec, run) for spec in loggers]


def _made(spec: Spec, run: LoggedRun) -> Reporter:
    def make() -> Reporter:
        found = call(CATALOG[spec.name] if spec.name in CATALOG else load_object(spec.name), spec, run=run)
        if not isinstance(found, Reporter):
            raise InputError(
                f"--loggers={spec} must be a class or function that makes a tfdist.reporting.Reporter. Received: "
                f"{type(found).__name__}. Derive it from tfdist.reporting.Logger."
            )
        return found

    return make() if spec.name == TENSORBOARD else OptionalReporter(spec.name, make)


def _tensorboard(run: LoggedRun) -> Reporter:
    return TensorBoardReporter(run.directory.tensorboard)


CATALOG: dict[str, Callable[..., Reporter]] = {TENSORBOARD: _tensorboard, "mlflow": MLflowLogger, "wandb": WandbLogger}
