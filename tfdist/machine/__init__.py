"""Report on this machine and the engines that work on it: versions, hardware, limits, variables, network, smoke tests.

Reported by `tfdist doctor`. The reporting process does not import TensorFlow or Horovod: code that could crash or hang
runs in separate processes. Measuring communication belongs to `tfdist bench`.
"""
