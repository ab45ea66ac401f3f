"""Meshes of devices, and layouts: which named dim of a tensor is split over which axis of a mesh.

Text, names and arithmetic. Placing tensors accordingly is DTensor's work, in `tfdist.distribution`.
"""
