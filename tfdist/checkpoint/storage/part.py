"""What is given to be written: blocks of tensors."""

import dataclasses

import numpy as np

from tfdist.checkpoint.storage import dtypes


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of one tensor, as one process holds it. The parts of all processes tile the tensor.

    Attributes:
      name: the tensor's, unique in the checkpoint.
      shape: of the whole tensor.
      offset: where the block begins, in elements along each axis.
      values: the block, contiguous in C's order, of a type in `dtypes.DTYPES`. Nobody changes it any more.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: np.ndarray

    @classmethod
    def whole(cls, name: str, values: np.ndarray) -> "Part":
        """A tensor that one process holds, as its one part; see the class."""
        return cls(name, values.shape, (0,) * values.ndim, values)

    def __post_init__(self) -> None:
        values = self.values
        if self.name == "__metadata__":
            raise ValueError("A tensor must have another name than what safetensors reserves. Received: __metadata__.")
        if not dtypes.is_known(values.dtype):
            known = ", ".join(dtypes.DTYPES)
            raise ValueError(f"{self.name} must have one of the types {known}. Received: {values.dtype!r}.")
        if not values.flags.c_contiguous:
            raise ValueError(f"{self.name} must be contiguous in C's order. Received: strides {values.strides}.")
        axes = zip(self.offset, values.shape, self.shape, strict=False)
        if not len(self.shape) == len(self.offset) == values.ndim or any(
            not 0 <= begin <= begin + size <= whole for begin, size, whole in axes
        ):
            raise ValueError(
                f"A block of {self.name} must lie in it. Received: {values.shape} at {self.offset} of {self.shape}."
            )

    @property
    def key(self) -> str:
        """The block's name in its shard: the tensor's, and behind it, if it is not all of it, the slices."""
        if self.values.shape == self.shape:
            return self.name
        ends = zip(self.offset, self.values.shape, strict=True)
        return f"{self.name}[{','.join(f'{begin}:{begin + size}' for begin, size in ends)}]"
