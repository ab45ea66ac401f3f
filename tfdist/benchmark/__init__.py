"""What `python -m tfdist.bench` measures: time and bandwidth of collectives. Importing it imports no TensorFlow."""
