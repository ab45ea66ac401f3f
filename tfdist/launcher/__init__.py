"""Starts, supervises, restarts and resizes the processes of a job, for `launch` and `spawn`.

`job_runner` runs a `job`. Each start of its processes is an `attempt`: `supervision` ends all when one fails, and
`job_controller` starts them again, or in another number, by `orders` to the launchers of all hosts. No launcher process
imports TensorFlow.
"""
