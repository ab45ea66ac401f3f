"""Parity tests for authors of strategies and reducers, and the comparison made by `tfdist verify`."""

from tfdist.testing.parity import CASES, Case, Outcome, compare, run_case

__all__ = ["CASES", "Case", "Outcome", "compare", "run_case"]
