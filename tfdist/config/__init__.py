"""The configuration of a run as frozen, validated dataclasses with one field per flag, and the conflicts between flags.

It also parses compound values: rules for variables, intervals, decays, meshes and layouts, the user's own code.
`train_config` declares the flags of `tfdist train`, and `conflicts` which exclude each other. Imports neither TensorFlow nor
absl: `tfdist.cli.flags` converts flags to these dataclasses.
"""
