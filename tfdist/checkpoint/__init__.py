"""Saves and restores runs: checkpoints on disk and in memory, and the state of a run that they contain.

`tfdist.checkpoint.format` writes and reads a checkpoint's files, and does not depend on runs.
"""
