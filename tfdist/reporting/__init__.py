"""Reporters of a run: terminal, metrics.jsonl, TensorBoard, curves and logs; and the run directory.

Reporters receive records, but neither compute nor communicate.
"""

from tfdist.reporting.loggers import LoggedRun, Logger
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.run_directory import RunDirectory

__all__ = ["LoggedRun", "Logger", "Reporter", "RunDirectory", "RunPlan"]
