"""The `Strategy` interface, lookup of strategies by name, and the engines that strategies share.

This package starts tf.distribute, DTensor, TensorFlow's servers and Horovod's rendezvous. Strategies are plug-ins in the
top-level directory `strategies/`, imported as `tfdist.strategies`.
"""
