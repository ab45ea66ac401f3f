"""Saves and restores runs: checkpoints on disk and in memory, and the state of a run that they contain.

`tfdist.checkpoint.storage` stores checkpoints as files, and does not depend on runs.
"""
