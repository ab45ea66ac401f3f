"""Semantics of the numbers that a user's code computes from the rows of a batch: means, sums, rows, or something else.

Derived from the operations of a traced function, never from data: each operation has a rule that says what its results are,
given what its inputs are. `tfdist.step.row_dependence` concludes from that what the losses and metrics of a model are, and
`tfdist.keras_fit.step_labels` what the results of a custom `train_step` are.
"""

from tfdist.row_semantics.declarations import register

__all__ = ["register"]
