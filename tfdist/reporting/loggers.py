"""Loggers, which send records of a run to an experiment tracker, as in `--loggers=tensorboard,mlflow(experiment='mine')`."""

import abc
import dataclasses
import functools
import importlib.util
import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.config.spec import Spec, call, load_object
from tfdist.coordination import Json
from tfdist.errors import InputError, nearest, one_line
from tfdist.reporting.reporter import MultiReporter, Reporter, RunPlan
from tfdist.reporting.run_directory import RunDirectory
from tfdist.reporting.schema import TRAIN, scalars
from tfdist.storage import storage_of

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """The run that a logger records."""

    directory: RunDirectory
    flags: Mapping[str, Json]  # values of flags, by name

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.directory.path.name or str(self.directory.path)

    @property
    def tags(self) -> dict[str, str]:
        """Tags for grouping runs: strategy, model, dataset and directory."""
        flag_tags = {name: str(self.flags[name]) for name in ("strategy", "model", "dataset") if name in self.flags}
        return {**flag_tags, "directory": str(self.directory.path)}

    def external_id(self, tracker: str) -> str:
        """Returns the run's id in a tracker, from an earlier attempt; "" if it has none."""
        return self._ids().get(tracker, "")

    def store_external_id(self, tracker: str, identifier: str) -> None:
        """Stores the run's id in a tracker, to be used when the run resumes."""
        text = json.dumps({**self._ids(), tracker: identifier}, indent=2)
        storage_of(self.directory.loggers).replace(self.directory.loggers, f"{text}\n".encode())

    def _ids(self) -> dict[str, str]:
        path = self.directory.loggers
        return json.loads(storage_of(path).read(path)) if storage_of(path).exists(path) else {}


class Logger(Reporter, abc.ABC):
    """A reporter of the numeric fields of records. Subclasses implement `log`.

    A user-defined class is used by `--loggers=package.module:Name(key=value, ...)`. Its constructor gets these arguments and,
    if it has a parameter `run`, the `LoggedRun`. Only the chief creates it. Its first error is logged and disables it, but
    does not end training.
    """

    @abc.abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Logs values.

        Args:
          values: numbers by name, such as `train/loss`, `train/learning_rate` or `eval/accuracy`.
          step: number of updates.
        """

    def record(self, record: Mapping[str, Json]) -> None:
        kind = record.get("kind", TRAIN)
        values = {f"{kind}/{name}": value for name, value in scalars(record)}
        if values and "step" in record:
            self.log(values, int(record["step"]))


class OptionalReporter(MultiReporter):
    """Forwards to the reporter that `make` returns, until its first error, which is logged; `make` may raise `InputError`."""

    busy = Reporter.busy

    def __init__(self, name: str, make: Callable[[], Reporter]):
        super().__init__(())
        self._name = name
        try:
            self._reporters = (make(),)
        except InputError:
            raise
        except Exception as error:
            self._fail(error)

    def close(self, outcome: str) -> None:
        self._forward("close", outcome)

    def _forward(self, method: str, *args: Any) -> None:
        try:
            super()._forward(method, *args)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._reporters = ()
        text = f"{type(error).__name__}: {one_line(str(error))}"
        _log.warning("The logger %s failed and is disabled; training continues. %s", self._name, text)
        _log.debug("Traceback of the error:", exc_info=error)


_MLFLOW = "mlflow"
_MAX_PARAMS = 100  # MLflow's limit per call
_MAX_PARAM_LENGTH = 500
_STATUS = {"done": "FINISHED", "preempted": "KILLED", "interrupted": "KILLED"}


class MLflowLogger(Logger):
    """Logs flags as params, and the numeric fields of records as metrics; a resumed run continues the same MLflow run.

    Args:
      run: the run to log.
      experiment: name of the experiment, which is created if necessary.
      tracking_uri: server, or directory as `file:///path`; by default, that of `MLFLOW_TRACKING_URI` or MLflow's default.
    """

    def __init__(self, run: LoggedRun, experiment: str = "tfdist", tracking_uri: str | None = None):
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric, self._tag = Metric, RunTag
        self._client = MlflowClient(tracking_uri=tracking_uri)
        self._id = self._resume(run.external_id(_MLFLOW)) or self._create(run, experiment)
        run.store_external_id(_MLFLOW, self._id)
        self._set_tags(run.tags)
        existing_params = self._client.get_run(self._id).data.params
        # MLflow refuses to change existing params, which may differ in a resumed run.
        flags = {k: v for k, v in run.flags.items() if k not in existing_params and v not in ("", None)}
        params = [Param(name, str(value)[:_MAX_PARAM_LENGTH]) for name, value in flags.items()]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MAX_PARAMS])

    def _resume(self, identifier: str) -> str:
        """Continues an earlier MLflow run; returns "" if it does not exist, for example on another server."""
        if not identifier:
            return ""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(identifier, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return ""
        return identifier

    def _create(self, run: LoggedRun, experiment: str) -> str:
        existing = self._client.get_experiment_by_name(experiment)
        identifier = existing.experiment_id if existing else self._client.create_experiment(experiment)
        return self._client.create_run(identifier, run_name=run.name).info.run_id

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        self._client.log_batch(self._id, tags=[self._tag(f"tfdist.{key}", value) for key, value in tags.items()])

    def start(self, plan: RunPlan) -> None:
        self._set_tags({"total_steps": str(plan.total_steps)})

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, outcome: str) -> None:
        self._set_tags({"outcome": outcome})
        self._client.set_terminated(self._id, status=_STATUS.get(outcome, "FAILED"))


_WANDB = "wandb"


class WandbLogger(Logger):
    """Logs flags as config, and the numeric fields of records; a resumed run continues the same W&B run.

    `WANDB_MODE=offline` writes to the directory `wandb` of the run, for `wandb sync`.

    Args:
      run: the run to log.
      project: name of the project.
      entity: user or team; by default W&B's default.
      mode: online, offline or disabled; by default that of `WANDB_MODE`.
    """

    def __init__(self, run: LoggedRun, project: str = "tfdist", entity: str | None = None, mode: str | None = None):
        import wandb

        path = run.directory.path
        self._run = wandb.init(
            project=project,
            entity=entity,
            mode=mode,
            id=run.external_id(_WANDB) or None,
            resume="allow",
            name=run.name,
            dir=str(path) if isinstance(path, Path) else None,
            config=dict(run.flags),
            tags=[f"{key}:{value}"[:64] for key, value in run.tags.items() if key != "directory"],
            settings=wandb.Settings(silent=True),
        )
        run.store_external_id(_WANDB, self._run.id)
        # W&B's own step may not decrease, but a resumed run repeats the steps since its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def close(self, outcome: str) -> None:
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome == "done" else 1)


TENSORBOARD = "tensorboard"


def _tensorboard(run: LoggedRun) -> Reporter:
    from tfdist.reporting.tensorboard import TensorBoardReporter  # imported late, because it loads NumPy

    return TensorBoardReporter(run.directory.tensorboard)


_INSTALL_COMMANDS = {"mlflow": "pip install mlflow-skinny", "wandb": "pip install wandb"}  # by required module
CATALOG: dict[str, Callable[..., Reporter]] = {TENSORBOARD: _tensorboard, "mlflow": MLflowLogger, "wandb": WandbLogger}


def check_installed(loggers: Sequence[Spec]) -> None:
    """Raises `InputError` if a logger's package is not installed, without importing it, or an argument is unknown."""
    for spec in loggers:
        if spec.name in CATALOG:
            names = [name for name in inspect.signature(CATALOG[spec.name]).parameters if name != "run"]
            if invalid := next((name for name in spec.args if name not in names), ""):
                raise InputError(
                    f'--loggers={spec}: {spec.name} has no parameter "{invalid}". Received: {spec}.{nearest(invalid, names)}'
                )
        install = _INSTALL_COMMANDS.get(spec.name)
        if install and importlib.util.find_spec(spec.name) is None:
            raise InputError(
                f"--loggers={spec.name} needs the package {spec.name}, which is not installed. Run: {install}."
            )


def check_user_defined(loggers: Sequence[Spec]) -> None:
    """Imports user-defined loggers, to report errors before a run starts."""
    for spec in loggers:
        if ":" in spec.name:
            load_object(spec.name)


def make_loggers(loggers: Sequence[Spec], run: LoggedRun) -> list[Reporter]:
    """Creates the loggers of a run, on the chief.

    TensorBoard's events are files of the run, so an error in writing them ends the run; errors of other loggers are warnings,
    except invalid arguments.
    """

    def make(spec: Spec) -> Reporter:
        logger = call(CATALOG[spec.name] if spec.name in CATALOG else load_object(spec.name), spec, run=run)
        if not isinstance(logger, Reporter):
            raise InputError(
                f"--loggers={spec} must be a class or function that returns a tfdist.reporting.Reporter. Received: "
                f"{type(logger).__name__}. Derive it from tfdist.reporting.Logger."
            )
        return logger

    return [
        make(spec) if spec.name == TENSORBOARD else OptionalReporter(spec.name, functools.partial(make, spec))
        for spec in loggers
    ]
