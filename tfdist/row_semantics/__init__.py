"""Semantics of the numbers that a user's code computes from the rows of a batch: means, sums, rows, or something else.

Derived from the operations of a traced function, never from data: each operation has a rule that says what its results are,
given what its inputs are.
"""

from tfdist.row_semantics.declarations import register

__all__ = ["register"]
