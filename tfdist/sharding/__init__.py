"""Device meshes, and layouts: which named dim of a tensor is sharded over which mesh axis.

Text, names and arithmetic only: layouts of a model's variables follow from the names of their dims, without DTensor. Placing
tensors accordingly is done with DTensor, in `tfdist.distribution`.
"""
