"""Meshes: grids of devices with named axes, as in Mesh TensorFlow. Does not import TensorFlow.

`tfdist.config.layouts` maps the dims of tensors to the axes of a mesh.

Shazeer et al., Mesh-TensorFlow: Deep Learning for Supercomputers, 2018 (arXiv:1811.02084).
"""

import dataclasses
import math
import re
from typing import TypeGuard

from tfdist.errors import InputError, nearest

_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*:\s*(\d{1,6})\s*")
_RESERVED_NAMES = ("unsharded", "match", "any")  # names that DTensor reserves
_MAX_DEVICES = 2**16  # more than any cluster has, few enough for fast planning
_GRAMMAR = 'A mesh is a list of NAME:SIZE separated by ;, such as "data:2;model:4"'


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The named axes of a grid of devices."""

    axes: dict[str, int]  # sizes by name, in order; devices are numbered along the last axis first

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.axes.values())

    def size_of(self, axis: str) -> int:
        """Returns the size of an axis; raises `InputError` with the nearest name if there is no such axis."""
        if axis not in self.axes:
            raise InputError(f"The mesh {self} has no axis {axis}.{nearest(axis, self.axes)}")
        return self.axes[axis]

    def splits(self, axis: str | None) -> TypeGuard[str]:
        """Returns whether a dim that is mapped to this axis is split into more than one part; False for None."""
        return axis is not None and self.axes[axis] > 1

    def __str__(self) -> str:
        """Returns the form of `--mesh_shape`."""
        return ";".join(f"{name}:{size}" for name, size in self.axes.items())


def parse_mesh(text: str) -> Mesh:
    """Parses `--mesh_shape`, such as "data:2;model:4"; raises `InputError`."""

    def error(rule: str, received: str) -> InputError:
        return InputError(f"{_GRAMMAR}{rule}. Received: {received} in {text!r}.")

    axes: dict[str, int] = {}
    for part in filter(str.strip, text.split(";")):
        match = _AXIS.fullmatch(part)
        if not match:
            raise error("", repr(part.strip()))
        name, size = match[1], int(match[2])
        if name in axes:
            raise error(", each name once", f"{name} twice")
        if name in _RESERVED_NAMES:
            raise error(f", with names other than {', '.join(_RESERVED_NAMES)}", repr(part.strip()))
        if not size:
            raise error(", each of at least 1 device", repr(part.strip()))
        axes[name] = size
    mesh = Mesh(axes)
    if not axes:
        raise error("", "an empty list")
    if mesh.size > _MAX_DEVICES:
        raise error(f", of at most {_MAX_DEVICES} devices", str(mesh.size))
    return mesh


def mesh_of(mesh_shape: str, devices: int, processes: int = 1) -> Mesh:
    """Returns the mesh that the flags describe, by default all devices along one axis, `data`.

    `devices` is the number per process; 0 for as many as the mesh needs, divided evenly between the processes.
    """
    if not mesh_shape:
        return Mesh({"data": max(devices, 1) * processes})
    mesh = parse_mesh(mesh_shape)
    if devices and mesh.size != devices * processes:
        raise InputError(
            f"The size of the mesh must be the job's number of devices. Received: --mesh_shape={mesh}, of size {mesh.size}, "
            f"--devices={devices}{f' on each of {processes} processes' if processes > 1 else ''}. Change one "
            "of them."
        )
    if mesh.size % processes:
        raise InputError(
            f"The size of the mesh must be divisible by the number of processes. Received: --mesh_shape={mesh}, of size "
            f"{mesh.size}, and {processes} processes. Change the mesh, or the number of processes."
        )
    return mesh
