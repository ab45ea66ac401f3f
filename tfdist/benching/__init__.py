"""What `python -m tfdist.bench` measures, and how it tells. Importing the package imports no TensorFlow."""
