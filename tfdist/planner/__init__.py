"""Plans a mesh and a layout before anything runs: bytes of state per device, and the communication of a step.

For meshes and for the stages of a pipeline. Computed from shapes, except that `--measure_stages` times stages on the device;
printed by `tfdist layout`.
"""
