"""What the chief of a run reports to."""

from collections.abc import Mapping, Sequence
from typing import TextIO

from tfdist.coordination import Json
from tfdist.reporting.curves import CurvesReporter
from tfdist.reporting.metrics_file import MetricsFile
from tfdist.reporting.reporter import MultiReporter, Reporter
from tfdist.reporting.run_directory import RunDirectory
from tfdist.reporting.tensorboard import TensorBoardReporter
from tfdist.reporting.terminal import terminal_or_plain


def chief_reporter(directory: RunDirectory, stream: TextIO, earlier: Sequence[Mapping[str, Json]] = ()) -> Reporter:
    """Returns the reporter of the rank that writes: a person's view on a stream, and the run directory's files.

    Args:
      directory: where metrics.jsonl, the TensorBoard events and curves.png go.
      stream: where a person looks, usually `sys.stderr`.
      earlier: records of the run from before it stopped, for the picture.
    """
    curves = CurvesReporter(directory.curves)
    curves.recall(earlier)
    return MultiReporter(
        [
            MetricsFile(directory.metrics),  # first: what the others may fail at is on record
            TensorBoardReporter(directory.tensorboard),
            curves,
            terminal_or_plain(stream),
        ]
    )
