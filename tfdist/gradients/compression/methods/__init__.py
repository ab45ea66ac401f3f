"""Compression methods, one file each, with the equation, the cost in bytes and the paper.

A method combines `kernels`; `catalog.py`, in the package above, has their names.
"""
