"""The configuration of a run as frozen, validated values, one field for each flag, and which flags exclude each other.

No TensorFlow, no absl: `tfdist.cli.flags` turns flags into these values.
"""
