"""Meshes: devices in a grid whose axes have names, as in Mesh TensorFlow. No TensorFlow.

A mesh has axes, a tensor has dims; see `tfdist.sharding.layouts` for what lays dims out on axes.

Shazeer et al., Mesh-TensorFlow: Deep Learning for Supercomputers, 2018 (arXiv:1811.02084).
"""

import dataclasses
import math
import re
from typing import TypeGuard

from tfdist.errors import InputError
from tfdist.grammar.spec import nearest

_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*:\s*(\d{1,6})\s*")
_TAKEN = ("unsharded", "match", "any")  # by DTensor, for dims that lie on no axis, or on one that it chooses
_MOST_DEVICES = 2**16  # more than any cluster has, and a plan of so many is quick
_GRAMMAR = 'A mesh is NAME:SIZE with ; between, such as "data:2;model:4"'


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The named axes of a grid of devices.

    Attributes:
      axes: sizes by name, in order; the last axis is that of devices next to each other.
    """

    axes: dict[str, int]

    @property
    def size(self) -> int:
        """How many devices it has."""
        return math.prod(self.axes.values())

    def size_of(self, axis: str) -> int:
        """Returns the size of an axis.

        Raises:
          InputError: there is no such axis; the nearest name is offered.
        """
        if axis not in self.axes:
            raise InputError(f"The mesh {self} has no axis {axis}.{nearest(axis, self.axes)}")
        return self.axes[axis]

    def splits(self, axis: str | None) -> TypeGuard[str]:
        """Whether a dim on this axis, if on any, lies in more than one part."""
        return axis is not None and self.axes[axis] > 1

    def __str__(self) -> str:
        """As it is written in `--mesh_shape`."""
        return ";".join(f"{name}:{size}" for name, size in self.axes.items())


def parse_mesh(text: str) -> Mesh:
    """Reads `--mesh_shape`, such as "data:2;model:4".

    Raises:
      InputError: `text` does not follow the grammar, names no axis, one twice or one as the engine may not, gives one no
        device, or has too many.
    """
    axes: dict[str, int] = {}
    for part in filter(str.strip, text.split(";")):
        found = _AXIS.fullmatch(part)
        if not found:
            raise InputError(f"{_GRAMMAR}. Received: {part.strip()!r} in {text!r}.")
        name, size = found[1], int(found[2])
        if name in axes:
            raise InputError(f"{_GRAMMAR}, each name once. Received: {name} twice in {text!r}.")
        if name in _TAKEN:
            raise InputError(
                f"{_GRAMMAR}, with other names than {' and '.join(_TAKEN)}. Received: {part.strip()!r} in {text!r}."
            )
        if not size:
            raise InputError(f"{_GRAMMAR}, each of at least 1 device. Received: {part.strip()!r} in {text!r}.")
        axes[name] = size
    if not axes:
        raise InputError(f"{_GRAMMAR}. Received: no axis in {text!r}.")
    mesh = Mesh(axes)
    if mesh.size > _MOST_DEVICES:
        raise InputError(f"{_GRAMMAR}, of at most {_MOST_DEVICES} devices. Received: {mesh.size} in {text!r}.")
    return mesh


def mesh_of(mesh_shape: str, devices: int, processes: int = 1) -> Mesh:
    """The mesh that flags ask for.

    Args:
      mesh_shape: as the flag; empty for all devices along one axis, `data`.
      devices: of each process; 0 for as many as the mesh needs.
      processes: of the job.

    Raises:
      InputError: the mesh has another number of devices, or cannot be dealt to the processes.
    """
    if not mesh_shape:
        return Mesh({"data": max(devices, 1) * processes})
    mesh = parse_mesh(mesh_shape)
    if devices and mesh.size != devices * processes:
        raise InputError(
            f"The mesh must have as many places as there are devices. Received: --mesh_shape={mesh}, {mesh.size} places, "
            f"--devices={devices}{f' on each of {processes} processes' if processes > 1 else ''}. Change one of them."
        )
    if mesh.size % processes:
        raise InputError(
            f"A mesh is dealt to processes in equal parts. Received: --mesh_shape={mesh}, {mesh.size} places, and "
            f"{processes} processes. Change the mesh, or the number of processes."
        )
    return mesh
