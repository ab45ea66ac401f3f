"""Starts, supervises, restarts and resizes the processes of a job, for `launch` and `spawn`.

`job_runner` runs a `job`. On each host, an `attempt` starts the processes, and `supervision` watches them and ends all of
them if one fails. For the whole job, `job_controller` decides about restarts and the number of processes, and sends `orders`
to the launchers of all hosts. Launchers do not import TensorFlow.
"""
