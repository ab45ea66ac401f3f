"""Starting the processes of a job, watching over them, and ending all of them: what `launch` and `spawn` share."""
