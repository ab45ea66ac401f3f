"""Saves and restores the state of runs in checkpoints on disk and in memory.

`manager` saves a run periodically and on preemption, `restore` restores it, and `replication` copies in-memory checkpoints
between hosts. `tfdist.checkpoint.format` writes and reads the files of a checkpoint.
"""
