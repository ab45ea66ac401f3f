"""This process in its job and on its host: rank and size, devices and cores, signals, preemption, exit status, terminal.

Rank and size come from TF_CONFIG, Slurm, MPI, Horovod or Kubernetes, by pure functions of a mapping of environment variables.
`tfdist.coordination` connects to the other processes, with which it coordinates the reaction to a signal.
"""
