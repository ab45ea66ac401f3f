"""What a plug-in's author needs to hold a strategy or a reducer to the promise of parity."""

from tfdist.testing.parity import CASES, Case, Outcome, compare, run_case

__all__ = ["CASES", "Case", "Outcome", "compare", "run_case"]
