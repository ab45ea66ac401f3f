"""Pipeline parallelism: stages of a model in different processes, which compute micro-batches one after the other.

`schedule_catalog` has the orders of computations by name, as data, without TensorFlow; `cutting` cuts a model into stages,
and `execution` runs a schedule. A stage is a part of the model; "pipeline" alone is the input pipeline of `tfdist.data`.
"""
