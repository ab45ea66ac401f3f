"""This process and its host: signals, preemption, stack dumps, the progress file, exit status, and its terminal and streams.

Pure Python. How all processes react to a signal together is defined in `tfdist.coordination` and `tfdist.checkpoint`.
"""
