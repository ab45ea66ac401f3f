"""Code that the commands share: flags, their completion, and creating strategy, run directory and model from flags.

It also contains the longer parts of some commands: the searches of `--find`, the build of Horovod, plans of layouts, and
`tfdist.distribute`. The commands themselves are the modules directly in `tfdist/`.
"""
