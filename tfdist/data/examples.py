"""`Examples`: the interface of data sets for pipelines, with random access or as a stream."""

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data.row_partition import RowPartition
from tfdist.errors import InputError

Element = tuple[Any, ...]  # (x, y) or (x, y, sample_weight); each a structure of tensors
# (batched x, y and, if there is one, sample_weight) -> the same.
Transform = Callable[..., Element]


class Examples(abc.ABC):
    """A finite number of examples in a natural order. Each is (x, y) or (x, y, sample_weight), of structures.

    Attributes:
      size: number of examples, at least 1.
    """

    size: int

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """The structure of `tf.TensorSpec` of one example, without a batch dim."""

    @abc.abstractmethod
    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        """Returns the data set of one process: `IndexedBatch`es of the examples at the positions assigned by `partition`.

        Args:
          partition: assignment of positions to the process's replicas.
          seed: seed of the order of examples in the endless stream of epochs; None for one pass in the natural order.

        Returns:
          A data set of `partition.elements` elements, in order.
        """

    @abc.abstractmethod
    def map(self, transform: Transform) -> "Examples":
        """Returns the same examples with `transform` applied to each batch; it must work row by row."""


def as_is(*element: Any) -> Element:
    """Returns its arguments: the identity transform."""
    return element


def chain(first: Transform, second: Transform) -> Transform:
    """Returns the transform that applies `first`, then `second`."""
    return lambda *element: second(*first(*element))


def check_element(element: Any) -> None:
    """Checks that an element is (x, y) or (x, y, sample_weight).

    Raises:
      InputError: the element is something else.
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
