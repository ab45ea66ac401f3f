"""Layouts of activations on a mesh, determined by propagating dim names through a model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.layers import MixtureOfExperts
from tfdist.sharding.dim_names import ATTENTIONS, Dims
from tfdist.sharding.layouts import given_way, laid_out
from tfdist.sharding.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Activation:
    """Layout of one tensor between layers.

    Attributes:
      axes: for each dim, the axis over which it is sharded, or None.
      bytes: bytes per device.
    """

    axes: tuple[str | None, ...]
    bytes: int

    @property
    def sequence_axes(self) -> list[str]:
        """Axes over which the dims between rows and features are sharded."""
        return [axis for axis in self.axes[1:-1] if axis]


class Activations:
    """Layouts of the layers' inputs and outputs as far as dim names are known; otherwise only rows are sharded."""

    def __init__(
        self,
        layers: Sequence[keras.Layer],
        variables: Mapping[int, Dims],
        mesh: Mesh,
        rules: Mapping[str, str],
        rows: int,
    ):
        """Propagates names through layers.

        Args:
          layers: layers in the order of computation, with known inputs and outputs.
          variables: dim names of each variable, by its id.
          mesh: mesh with its axes.
          rules: axis by dim.
          rows: number of rows of a global batch.
        """
        self._mesh, self._rules, self._rows = mesh, rules, rows
        self._names: dict[int, Dims] = {}
        for layer in layers:
            if not keras.tree.flatten(layer.input):  # an input layer
                continue
            if constrained := getattr(layer, "tfdist_dims", None):
                self._names[id(layer.output)] = self._checked(layer, constrained)
                continue
            names = self._names_of(first(layer.input))
            for tensor in keras.tree.flatten(layer.output):
                self._names[id(tensor)] = _names_behind(layer, names, tensor, variables)

    def _checked(self, layer: keras.Layer, dims: Dims) -> Dims:
        """Returns the names given by a constraint; raises `InputError` if they cannot be laid out."""
        names = tuple(given_way(dims, self._rules))
        laid_out(layer.name, names, _shape(layer.output, self._rows), self._rules, self._mesh, lenient=("batch",))
        return names

    def is_kept(self, layer: keras.Layer) -> bool:
        """Returns whether a layer's output has the layout of its input, as for a constraint without effect."""
        return hasattr(layer, "tfdist_dims") and self.of(layer.input) == self.of(layer.output)

    @property
    def dims(self) -> set[str]:
        """All names."""
        return {name for names in self._names.values() for name in names if name}

    def of(self, tensors: object) -> Activation:
        """Returns the layout of the first tensor of a structure."""
        tensor = first(tensors)
        axes: list[str | None] = []
        for name, size in zip(self._names_of(tensor), _shape(tensor, self._rows), strict=True):
            axis = self._rules.get(name) if name else None
            fits = self._mesh.splits(axis) and axis not in axes and not size % self._mesh.axes[axis]
            axes.append(axis if fits else None)
        return Activation(tuple(axes), self.bytes_with(tensor, axes))

    def bytes_with(self, tensor: keras.KerasTensor, axes: Sequence[str | None]) -> int:
        """Returns the bytes per device of a tensor with these axes."""
        parts = math.prod(self._mesh.axes[axis] for axis in axes if axis)
        return math.prod(_shape(tensor, self._rows)) * tf.as_dtype(tensor.dtype).size // parts

    def bytes(self, tensors: object) -> int:
        """Returns the bytes per device of all tensors of a structure."""
        return sum(self.of(tensor).bytes for tensor in keras.tree.flatten(tensors))

    def _names_of(self, tensor: keras.KerasTensor) -> Dims:
        return self._names.get(id(tensor)) or _rows_alone(tensor)


def _names_behind(layer: keras.Layer, names: Dims, output: keras.KerasTensor, variables: Mapping[int, Dims]) -> Dims:
    """Returns the names of a layer's output, given those of its first input."""
    found = names if tuple(first(layer.input).shape) == tuple(output.shape) else _rows_alone(output)
    if isinstance(layer, MixtureOfExperts):
        found = ("batch", None, names[-1])
    elif isinstance(layer, keras.layers.Embedding):
        found = (*names, variables[id(keras_internals.kernel_of(layer))][-1])
    elif isinstance(layer, keras.layers.Dense):
        found = (*names[:-1], variables[id(keras_internals.kernel_of(layer))][-1])
    elif isinstance(layer, ATTENTIONS):
        found = (*names[:-1], None)
    return found if len(found) == len(output.shape) else _rows_alone(output)


def _rows_alone(tensor: keras.KerasTensor) -> Dims:
    """Returns the names of a tensor of which nothing else is known."""
    return ("batch", *[None] * (len(tensor.shape) - 1)) if tensor.shape else ()


def first(tensors: object) -> keras.KerasTensor:
    """Returns the first tensor of a structure."""
    return keras.tree.flatten(tensors)[0]


def _shape(tensor: keras.KerasTensor, rows: int) -> list[int]:
    """Returns the shape with this number of rows; other unknown sizes count as 1."""
    return [rows if i == 0 else size or 1 for i, size in enumerate(tensor.shape)]
