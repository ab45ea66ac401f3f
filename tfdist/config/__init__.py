"""The configuration of a run as frozen, validated dataclasses with one field per flag, and the conflicts between flags.

It also parses compound values: rules for variables, intervals, decays, meshes, layouts and names of user code.
`train_config` declares the flags of `tfdist train`, `job_config` those that `tfdist run` also has, `strategy_registry` the
options of strategies, and `conflicts` the combinations that are not allowed. This package imports neither TensorFlow nor absl:
`tfdist.cli.flags` converts flags to these dataclasses.
"""
