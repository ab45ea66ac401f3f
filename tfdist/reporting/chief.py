"""Creates the chief's reporter."""

from collections.abc import Mapping, Sequence
from typing import TextIO

from tfdist.coordination import Json
from tfdist.reporting.curves import CurvesReporter
from tfdist.reporting.display import terminal_or_plain
from tfdist.reporting.metrics_file import MetricsFile
from tfdist.reporting.outcome_file import OutcomeFile
from tfdist.reporting.python_logging import LogReporter
from tfdist.reporting.reporter import MultiReporter, Reporter
from tfdist.reporting.run_directory import RunDirectory
from tfdist.reporting.tensorboard import TensorBoardReporter


def chief_reporter(
    directory: RunDirectory,
    stream: TextIO,
    earlier: Sequence[Mapping[str, Json]] = (),
    loggers: Sequence[Reporter] | None = None,
) -> Reporter:
    """Returns the chief's reporter: to a stream for the user, and to the files of the run directory.

    Args:
      directory: directory for metrics.jsonl, outcome.json, TensorBoard events and curves.png.
      stream: stream for the user, usually `sys.stderr`.
      earlier: records of the run from before it resumed, for curves.png.
      loggers: further reporters, see `make_loggers`; by default, TensorBoard.
    """
    curves = CurvesReporter(directory.curves, directory.path.name)
    curves.preload(earlier)
    return MultiReporter(
        [
            MetricsFile(directory.metrics),  # first, so that a record is stored even if another reporter fails
            OutcomeFile(directory.outcome),
            LogReporter(),
            *([TensorBoardReporter(directory.tensorboard)] if loggers is None else loggers),
            curves,
            terminal_or_plain(stream),
        ]
    )
