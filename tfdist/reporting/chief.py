"""What the chief of a run reports to."""

from typing import TextIO

from tfdist.reporting.curves import CurvesReporter
from tfdist.reporting.metrics_file import MetricsFile
from tfdist.reporting.reporter import MultiReporter, Reporter
from tfdist.reporting.run_directory import RunDirectory
from tfdist.reporting.tensorboard import TensorBoardReporter
from tfdist.reporting.terminal import terminal_or_plain


def chief_reporter(directory: RunDirectory, stream: TextIO) -> Reporter:
    """Returns the reporter of the rank that writes: a person's view on a stream, and the run directory's files.

    Args:
      directory: where metrics.jsonl, the TensorBoard events and curves.png go.
      stream: where a person looks, usually `sys.stderr`.
    """
    return MultiReporter(
        [
            MetricsFile(directory.metrics),  # first: what the others may fail at is on record
            TensorBoardReporter(directory.tensorboard),
            CurvesReporter(directory.curves),
            terminal_or_plain(stream),
        ]
    )
