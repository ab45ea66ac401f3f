"""Saves and restores runs: checkpoints on disk and in memory, and the state of a run that they contain.

`manager` saves a run at its intervals and when a signal asks for its end, `restore` restores it, and `replication` copies
checkpoints in memory between hosts. `tfdist.checkpoint.format` writes and reads a checkpoint's files, and does not depend on
runs.
"""
