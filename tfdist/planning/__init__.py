"""Plans, measurements and searches before a run.

`layout_plan` and `pipeline_plan` compute memory and communication from shapes (`tfdist layout`), `benchmark_timing` measures
collectives (`tfdist bench`), and `learning_rate` and `batch_size` search for good values (`--find`).
"""
