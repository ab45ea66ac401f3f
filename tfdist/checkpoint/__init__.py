"""When a run is saved and how it is restored: checkpoints on disk and in memory, and the state of a run that they hold.

How a checkpoint is stored as files is `tfdist.checkpoint.storage`, which knows of no run.
"""
