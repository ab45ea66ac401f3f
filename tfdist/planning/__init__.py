"""Plans, measurements and searches before a run: its cost, and values that suit it.

`layout_plan` and `pipeline_plan` compute bytes and communication from shapes (`tfdist layout`), `benchmark_timing` measures
collectives (`tfdist bench`), `learning_rate` and `batch_size` search for values and change nothing in a run (`--find`).
"""
