"""Plans a mesh and a layout before anything runs: bytes of state per device, and the communication of a step.

Computed from shapes only; printed by `python -m tfdist.layout`.
"""
