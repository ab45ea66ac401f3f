"""The contract `Strategy`, how a strategy is found by name, and the engines that strategies share.

tf.distribute, DTensor, TensorFlow's servers and Horovod's rendezvous are started here. The strategies themselves are plug-ins,
in `strategies/` at the top level of the repository, and are imported as `tfdist.strategies`.
"""
