"""This process and its host: signals, preemption notices, stack dumps, and the progress file.

Pure Python. How all processes react to a signal together is defined in `tfdist.coordination` and `tfdist.checkpoint`.
"""
