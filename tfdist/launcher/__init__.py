"""Starts, supervises, restarts and resizes the processes of a job, for `launch` and `spawn`.

No launcher process imports TensorFlow.
"""
