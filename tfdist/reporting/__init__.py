"""Reports of a run: terminal, metrics.jsonl, TensorBoard, curves, logs, and the run directory.

Reporters receive records; they neither compute nor communicate.
"""

from tfdist.reporting.curves import CurvesReporter
from tfdist.reporting.display import TerminalReporter, chief_reporter, terminal_or_plain
from tfdist.reporting.ledger_file import LedgerFile, NullLedger
from tfdist.reporting.logger import LoggedRun, Logger
from tfdist.reporting.metrics_file import MetricsFile
from tfdist.reporting.plain_reporter import PlainReporter
from tfdist.reporting.profile import NullProfile, ProfileWindow
from tfdist.reporting.reporter import MultiReporter, Reporter, RunPlan, synchronizer
from tfdist.reporting.run_directory import RunDirectory
from tfdist.reporting.tensorboard import TensorBoardReporter
from tfdist.reporting.timing import StepTimer

__all__ = [
    "CurvesReporter",
    "LedgerFile",
    "LoggedRun",
    "Logger",
    "MetricsFile",
    "MultiReporter",
    "NullLedger",
    "NullProfile",
    "PlainReporter",
    "ProfileWindow",
    "Reporter",
    "RunDirectory",
    "RunPlan",
    "StepTimer",
    "TensorBoardReporter",
    "TerminalReporter",
    "chief_reporter",
    "synchronizer",
    "terminal_or_plain",
]
