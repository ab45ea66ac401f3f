"""`Examples`: what a pipeline can ask of any data set, whether it has random access or is a stream."""

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data.row_partition import Deal
from tfdist.errors import InputError

Element = tuple[Any, ...]  # (x, y) or (x, y, sample_weight); a structure of tensors in each place
Transform = Callable[..., Element]  # takes the batched x, y and sample_weight (if there is one); returns such a tuple


class Examples(abc.ABC):
    """A finite number of examples in a natural order. Each is (x, y) or (x, y, sample_weight), of structures.

    Attributes:
      size: how many examples there are, at least 1.
    """

    size: int

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """The structure of `tf.TensorSpec` of one example, without a batch dim."""

    @abc.abstractmethod
    def deal(self, deal: Deal, seed: int | None) -> tf.data.Dataset:
        """The elements that a process takes: for each a `Numbered` batch of the examples at the positions that the deal says.

        Args:
          deal: who takes which positions.
          seed: of the order of examples in the endless stream of epochs; None for one pass in the natural order.

        Returns:
          `deal.elements` elements, in order.
        """

    @abc.abstractmethod
    def map(self, transform: Transform) -> "Examples":
        """The same examples in the same order, each batch seen through `transform`, which must work row by row."""


def as_is(*element: Any) -> Element:
    """The identity of transforms."""
    return element


def chain(first: Transform, second: Transform) -> Transform:
    """The transform that applies the first, then the second."""
    return lambda *element: second(*first(*element))


def check_element(element: Any) -> None:
    """Checks that something is (x, y) or (x, y, sample_weight).

    Raises:
      InputError: it is not.
    """
    if not (isinstance(element, tuple) and len(element) in (2, 3)):
        kind = type(element).__name__
        found = f"{kind} of {len(element)}" if isinstance(element, tuple | list | dict) else kind
        raise InputError(
            f"Examples must be tuples (x, y) or (x, y, sample_weight). Received: {found}. Structures go inside x and y."
        )


def spec_of_one(batched: Any) -> Any:
    """Drops the batch dim of a data set's element_spec.

    Raises:
      InputError: an element is not (x, y) or (x, y, sample_weight).
    """
    check_element(batched)
    return tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), batched)
