"""What the author of a strategy or a reducer needs to test it for parity, and what `python -m tfdist.verify` compares."""

from tfdist.testing.parity import CASES, Case, Outcome, compare, run_case

__all__ = ["CASES", "Case", "Outcome", "compare", "run_case"]
