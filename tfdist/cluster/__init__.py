"""Who this process is among how many, and what it may use: TF_CONFIG, Slurm, MPI, Horovod and Kubernetes, devices, cores.

Pure functions of a mapping of environment variables, except for the devices. Connecting to the others is `tfdist.coordination`.
"""
