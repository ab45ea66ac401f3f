"""Code shared by commands: flags, and the creation of strategy, run directory and model from flags.

Also contains the longer parts of some commands: the searches of `--find`, the build of Horovod, plans of layouts, and
`tfdist.distribute`. The commands are the modules directly in `tfdist/`, except the libraries `errors`, `models` and `testing`.
"""
