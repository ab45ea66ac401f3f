"""Compression methods, one file each, with the equation, the cost in bytes and the paper.

A method combines `kernels`; `catalog.py` has their names.
"""
