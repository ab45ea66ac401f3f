"""The input of a write: blocks of tensors."""

import dataclasses

import numpy as np

from tfdist.checkpoint.format import dtypes


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of one tensor in one process. The blocks of all processes tile the tensor.

    Attributes:
      name: name of the tensor, unique in the checkpoint.
      shape: shape of the complete tensor.
      offset: start of the block, in elements along each axis.
      values: the block, C-contiguous, with a dtype of `dtypes.DTYPES`. Must not be modified afterwards.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: np.ndarray

    @classmethod
    def full(cls, name: str, values: np.ndarray) -> "Part":
        """Returns a complete tensor as a single block."""
        return cls(name, values.shape, (0,) * values.ndim, values)

    def __post_init__(self) -> None:
        values = self.values
        if self.name == "__metadata__":
            raise ValueError("A tensor must not have a name that safetensors reserves. Received: __metadata__.")
        if not dtypes.is_known(values.dtype):
            known = ", ".join(dtypes.DTYPES)
            raise ValueError(f"{self.name} must have one of the types {known}. Received: {values.dtype!r}.")
        if not values.flags.c_contiguous:
            raise ValueError(f"{self.name} must be C-contiguous. Received: strides {values.strides}.")
        axes = zip(self.offset, values.shape, self.shape, strict=False)
        if not len(self.shape) == len(self.offset) == values.ndim or any(
            not 0 <= begin <= begin + size <= whole for begin, size, whole in axes
        ):
            raise ValueError(
                f"A block of {self.name} must be inside it. Received: {values.shape} at {self.offset} of {self.shape}."
            )

    @property
    def key(self) -> str:
        """Name of the block in its shard: that of the tensor, followed by the slices of a proper part."""
        if self.values.shape == self.shape:
            return self.name
        ends = zip(self.offset, self.values.shape, strict=True)
        return f"{self.name}[{','.join(f'{begin}:{begin + size}' for begin, size in ends)}]"
