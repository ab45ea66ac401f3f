"""The training step on every replica and the compiled loop around it: loss, metrics, randomness, state, evaluation.

`compiled_steps` creates a `step.Step` and its loop (`compiled_loop`). A step computes gradients (`gradient_source`), reduces
them (`reduction`), and applies them if they are finite. `row_dependence` derives which losses, metrics and state need all
rows of a batch. Records, checkpoints and callbacks between calls of the loop are in `tfdist.trainer`.
"""
