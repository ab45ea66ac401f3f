"""The shell of the commands: flags in, an exit code out; opening a strategy, a run directory and a model from flags.

The commands themselves are the modules of `tfdist/`, one file each.
"""
