"""Device meshes, and layouts: which named dim of a tensor is sharded over which mesh axis.

Text, names and arithmetic only. Placing tensors accordingly is done with DTensor, in `tfdist.distribution`.
"""
