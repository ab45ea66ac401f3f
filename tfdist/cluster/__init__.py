"""This process in its job and on its host: rank and size, devices and cores, signals, preemption, exit status, terminal.

Rank and size come from TF_CONFIG, Slurm, MPI, Horovod or Kubernetes, by pure functions of environment variables.
`tfdist.coordination` connects the processes and coordinates their reaction to signals.
"""
