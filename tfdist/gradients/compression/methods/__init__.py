"""Compression methods, one file each, with the equation, the cost in bytes and the paper.

What methods share, and `catalog.py` with their names, are in the package above.
"""
