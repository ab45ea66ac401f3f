"""The training step on every replica and the compiled loop around it: loss, metrics, randomness, state, evaluation.

It also contains the checks of the first batch: labels, and outputs or state of a row that depend on other rows, which
`row_dependence` derives from the labels of `tfdist.row_semantics`. What happens between calls of the loop (records,
checkpoints, callbacks) is in `tfdist.trainer`.
"""
