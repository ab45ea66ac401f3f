"""The training step on every replica and the compiled loop around it: loss, metrics, randomness, state, evaluation.

What happens between calls of the loop (records, checkpoints, callbacks) is in `tfdist.trainer`.
"""
