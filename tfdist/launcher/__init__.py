"""Starting the processes of a job, supervising them, restarting and resizing it: what `launch` and `spawn` share.

No process here imports TensorFlow.
"""
