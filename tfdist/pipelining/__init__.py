"""Pipeline parallelism: the stages of a model run in different processes, and micro-batches flow through them.

`schedule_catalog` defines the schedules as data, without TensorFlow; `cutting` cuts a model into stages, and `execution` runs
a schedule.
"""
