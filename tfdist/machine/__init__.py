"""Report on this machine and the engines that work on it: versions, hardware, limits, variables, network, smoke tests.

Reported by `tfdist doctor`. Nothing here imports TensorFlow or Horovod into the process that reports: what could
crash or hang runs in processes of its own. Measuring communication belongs to `tfdist bench`.
"""
