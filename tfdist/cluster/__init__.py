"""This process in its job and on its host: rank and size, devices and cores, signals, preemption, exit status, terminal.

Rank and size come from TF_CONFIG, Slurm, MPI, Horovod or Kubernetes, by pure functions of a mapping of environment variables.
Connecting to the other processes, and reacting to a signal together with them, is `tfdist.coordination`.
"""
