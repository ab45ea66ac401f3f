"""The configuration of a run as frozen, validated dataclasses with one field per flag, and the conflicts between flags.

Imports neither TensorFlow nor absl: `tfdist.cli.flags` converts flags to these dataclasses.
"""
