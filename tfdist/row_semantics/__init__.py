"""Labels of the values that user code computes from the rows of a batch: means, sums, rows, or others.

Labels are derived from the operations of a traced function, never from data: each type of operation has a rule from the labels
of its inputs to those of its results. `tfdist.step.row_dependence` labels the losses and metrics of a model,
`tfdist.keras_fit.step_labels` the steps of Keras's `fit`.
"""

from tfdist.row_semantics.declarations import register

__all__ = ["register"]
