"""Pipeline parallelism: stages of a model in different processes, which compute micro-batches one after the other.

`schedules/` has the orders of computations as data, without TensorFlow. A stage is a part of the model; "pipeline" alone is
the input pipeline of `tfdist.data`.
"""
