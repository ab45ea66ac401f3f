"""The base class of loggers, which send records of a run to an experiment tracker."""

import abc
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping

from tfdist.coordination import Json
from tfdist.errors import InputError
from tfdist.errors.engine_errors import one_line
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.run_directory import RunDirectory
from tfdist.reporting.schema import TRAIN, scalars
from tfdist.storage import storage_of

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """The run that a logger records.

    Attributes:
      directory: its directory.
      flags: its flags, by name.
    """

    directory: RunDirectory
    flags: Mapping[str, Json]

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.directory.path.name or str(self.directory.path)

    @property
    def tags(self) -> dict[str, str]:
        """Tags for grouping runs: strategy, model, data set and directory."""
        flag_tags = {name: str(self.flags[name]) for name in ("strategy", "model", "dataset") if name in self.flags}
        return {**flag_tags, "directory": str(self.directory.path)}

    def external_id(self, tracker: str) -> str:
        """Returns the run's id in a tracker, from an earlier start; "" if it has none."""
        return self._ids().get(tracker, "")

    def store_external_id(self, tracker: str, identifier: str) -> None:
        """Stores the run's id in a tracker, for when the run resumes."""
        text = json.dumps({**self._ids(), tracker: identifier}, indent=2)
        storage_of(self.directory.loggers).replace(self.directory.loggers, f"{text}\n".encode())

    def _ids(self) -> dict[str, str]:
        try:
            ids = json.loads(storage_of(self.directory.loggers).read(self.directory.loggers))
        except (OSError, ValueError, RecursionError):
            return {}
        return {name: str(value) for name, value in ids.items()} if isinstance(ids, dict) else {}


class Logger(Reporter, abc.ABC):
    """A reporter of the numbers in records. Subclasses implement `log`.

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
        """See base class."""
        kind = record.get("kind", TRAIN)
        values = {f"{kind}/{name}": value for name, value in scalars(record)}
        if values and "step" in record:
            self.log(values, int(record["step"]))


class OptionalReporter(Reporter):
    """Forwards to a reporter until it fails, which is only a warning.

    Args:
      name: name of the reporter, for the warning.
      make: creates the reporter; only `InputError` is raised again.
    """

    def __init__(self, name: str, make: Callable[[], Reporter]):
        self._name = name
        self._reporter: Reporter = Reporter()
        try:
            self._reporter = make()
        except InputError:
            raise
        except Exception as error:
            self._fail(error)

    def start(self, plan: RunPlan) -> None:
        """See base class."""
        self._try(lambda: self._reporter.start(plan))

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""
        self._try(lambda: self._reporter.progress(step, record))

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class."""
        self._try(lambda: self._reporter.record(record))

    def sync(self) -> None:
        """See base class."""
        self._try(lambda: self._reporter.sync())

    def close(self, outcome: str) -> None:
        """See base class."""
        self._try(lambda: self._reporter.close(outcome))

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._reporter = Reporter()
        _log.warning(
            "The logger %s failed and is disabled; training continues. %s: %s",
            self._name,
            type(error).__name__,
            one_line(str(error)),
        )
        _log.debug("Traceback of the error:", exc_info=error)
