"""The training step on every replica and the compiled loop around it: loss, metrics, randomness, state, evaluation.

Also checks the first batch: its labels, and whether the outputs or state of a row depend on other rows. Records,
checkpoints and callbacks between calls of the loop are in `tfdist.trainer`.
"""
