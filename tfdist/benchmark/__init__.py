"""Benchmarks of `python -m tfdist.bench`: time and bandwidth of collectives. Imports TensorFlow only when needed."""
