"""Compression methods, one file for each kind, each with its equation, its cost in bytes and the paper.

Shared code and `catalog.py`, which maps names to methods, are in the parent package.
"""
