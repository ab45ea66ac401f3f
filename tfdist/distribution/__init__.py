"""The `Strategy` contract, lookup of strategies by name, and the engines that strategies share.

This package starts tf.distribute, DTensor, TensorFlow's servers and Horovod's rendezvous. The strategies themselves are
plug-ins in the top-level directory `strategies/`, imported as `tfdist.strategies`.
"""
