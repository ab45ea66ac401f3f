"""What a run will cost, and which values suit it, before anything is trained.

`layout_plan` and `pipeline_plan` compute bytes and communication from shapes (`tfdist layout`), `benchmark_timing` measures
collectives (`tfdist bench`), `learning_rate` and `batch_size` search for values and leave no trace in a run (`--find`).
"""
