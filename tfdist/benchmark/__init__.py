"""Benchmarks of `tfdist bench`: time and bandwidth of collectives. Imports TensorFlow only when needed."""
