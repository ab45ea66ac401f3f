"""Infrastructure of the commands: flags, exit codes, and creating strategy, run directory and model from flags.

The commands themselves are the modules directly in `tfdist/`.
"""
