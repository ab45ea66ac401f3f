"""This process and its host: signals, preemption notices, stack dumps, and the file in which it notes its progress.

Pure Python. What all processes do together about a signal is `tfdist.coordination` and `tfdist.checkpoint`.
"""
