"""Parity tests for authors of strategies and reducers, the comparison made by `tfdist verify`, and jobs for tests."""

from tfdist.testing.parity import CASES, Case, Outcome, compare, run_case

__all__ = ["CASES", "Case", "Outcome", "compare", "run_case"]
