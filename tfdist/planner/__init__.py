"""What a mesh and a layout mean for each device before anything runs: bytes of state, and what a step sends.

It computes from shapes alone; `python -m tfdist.layout` prints it.
"""
