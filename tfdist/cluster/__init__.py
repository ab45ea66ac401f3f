"""Detects rank and size of this process, from TF_CONFIG, Slurm, MPI, Horovod or Kubernetes, and its devices and cores.

Pure functions of a mapping of environment variables, except for devices and cores. Connecting to the other processes is
`tfdist.coordination`.
"""
