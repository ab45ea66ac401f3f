"""Defines `Examples`, the interface between datasets and input pipelines, and applies class weights."""

import abc
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.row_partition import RowPartition, strip_none
from tfdist.errors import InputError

Element = tuple[Any, ...]  # (x, y) or (x, y, sample_weight) of structures of tensors
Transform = Callable[..., Element]  # a function of the batched x, y and, if present, sample_weight


def identity(*element: Any) -> Element:
    """Returns its arguments unchanged, as a transform."""
    return element


def chain(first: Transform, second: Transform) -> Transform:
    """Returns the transform that applies `first`, then `second`."""
    with_autograph = keras_internals.with_autograph
    return lambda *element: with_autograph(second)(*with_autograph(first)(*element))


class Origins(NamedTuple):
    """The origin of each example."""

    kind: str  # what `names` are: "file" for file names, "line" for line numbers in a file
    names: Sequence[str] | Sequence[int]  # name or number for each example, in the natural order


class Examples(abc.ABC):
    """A finite number of examples in a natural order, each (x, y) or (x, y, sample_weight) of structures of tensors.

    Attributes:
      size: number of examples per epoch, at least 1.
      batch_size: number of rows in each batch of batched data; None if the data is not batched.
      rows: number of examples in one pass over the data, if it may be less than `size`.
      is_reiterable: whether each iterator begins with the first example; otherwise all iterators read one stream.
      batch_text: description of the examples of a step, if a step does not use `batch_size` examples; otherwise "".
      origins: the origin of each example; None if unknown.
    """

    size: int
    batch_text: str = ""
    batch_size: int | None = None
    rows: int | None = None
    is_reiterable: bool = True
    origins: Origins | None = None
    _transform: Transform = staticmethod(identity)  # applied to batches
    _shuffle: bool = True  # whether each epoch has its own random order

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """Structure of `tf.TensorSpec`s of one example, without a batch dim."""

    @abc.abstractmethod
    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        """Returns the dataset of one process: `IndexedBatch`es of the examples at the positions assigned by `partition`.

        Args:
          partition: assignment of positions to the process's replicas.
          seed: seed of the order of examples in the endless stream of epochs; None for one pass in the natural order.

        Returns:
          A dataset of `partition.elements` elements, in order.
        """

    @property
    def sample(self) -> "Examples":
        """Similar examples that can be read at any time, even while a pipeline reads these."""
        return self

    @property
    def checksum(self) -> int | None:
        """A checksum of data that must be the same on every process, in [-2**63, 2**63); None if not available."""
        return None

    def in_order(self) -> Self:
        """Returns the same examples, in their natural order in every epoch."""
        return self._copy_with(_shuffle=False)

    def preview(self, rows: int) -> Element:
        """Returns some examples, to check before training; while a pipeline reads, call `sample.preview` instead.

        Args:
          rows: maximum number of examples to return, at least 1. Data in memory may return more.
        """
        partition = RowPartition(min(rows, self.size), (0,), 1, total=self.size)
        with tf.device("CPU:0"):
            return next(iter(self.indexed_batches(partition, seed=None).take(1))).batch

    def map(self, transform: Transform) -> Self:
        """Returns the same examples with `transform` applied to each batch; it must work row by row."""
        return self._copy_with(_transform=chain(self._transform, transform))

    def _copy_with(self, **attributes: Any) -> Self:
        examples = copy.copy(self)
        vars(examples).pop("element_spec", None)  # it may be cached
        vars(examples).update(attributes)
        return examples

    def explain(self, error: Exception) -> InputError | None:
        """Returns an error with the cause of a TensorFlow error that was raised while reading examples; None if unknown.

        Called after a run has failed, so it may search for an example that cannot be read.
        """
        return None


class WrappedExamples(Examples):
    """Examples that wrap other examples, and delegate to them whatever a subclass does not override."""

    def __init__(self, examples: Examples, size: int):
        """Wraps `examples`, of which `size` count as an epoch."""
        self._examples, self.size = examples, size
        self.batch_size, self.rows = examples.batch_size, examples.rows
        self.is_reiterable = examples.is_reiterable

    @property
    def element_spec(self) -> Any:
        return self._examples.element_spec

    @property
    def sample(self) -> Examples:
        return self._examples.sample

    @property
    def checksum(self) -> int | None:
        return self._examples.checksum

    def in_order(self) -> Self:
        return self._copy_with(_examples=self._examples.in_order())

    def map(self, transform: Transform) -> Self:
        return self._copy_with(_examples=self._examples.map(transform))

    def explain(self, error: Exception) -> InputError | None:
        return self._examples.explain(error)


class PartialEpochs(WrappedExamples):
    """Examples with a fixed number of examples per epoch, regardless of the size of the data.

    An evaluation uses the first `size` examples.
    """

    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        batches = self._examples.indexed_batches(partition, seed)
        return batches if partition.total is None else batches.take(partition.elements)


NO_TARGETS = ()  # y of examples without targets


def without_targets(*x: Any) -> Element:
    """Returns `(x, NO_TARGETS)` for a single input x, or for a tuple of several inputs."""
    return x[0] if len(x) == 1 else x, NO_TARGETS


def as_element(batch: Any) -> Element:
    """Converts a batch or an example, in any form that Keras accepts, to a tuple (x, y) or (x, y, sample_weight).

    Keras also accepts a list or a named tuple, and x or (x,) for data without targets; y and sample_weight may be None.
    """
    batch = strip_none(batch)
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return parts if len(parts) > 1 else without_targets(*parts)


def map_to_elements(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset with `as_element` applied to its elements."""
    spec = dataset.element_spec
    if type(spec) is tuple:
        return dataset.map(lambda *parts: as_element(parts)) if len(spec) == 1 or _is_absent(spec[-1]) else dataset
    return dataset.map(as_element)


def check_element(element: Any) -> None:
    """Checks that an element is (x, y) or (x, y, sample_weight); raises `InputError` otherwise."""
    if not (isinstance(element, tuple) and len(element) in (2, 3)):
        kind = type(element).__name__
        received = f"{kind} of {len(element)}" if isinstance(element, tuple | list | dict) else kind
        raise InputError(
            f"Examples must be tuples (x, y) or (x, y, sample_weight). Received: {received}. Put structures inside x and y."
        )
    for name, part in zip(("x", "y", "sample_weight"), element, strict=False):
        if any(map(_is_absent, tf.nest.flatten(part))):
            raise InputError(f"Examples must consist of arrays. Received: {name} that contains None. Remove the None.")


def _is_absent(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, tf.NoneTensorSpec | tf.OptionalSpec)


def unbatched_spec(batched_spec: Any) -> Any:
    """Returns the element_spec of a batched dataset without the batch dim; raises `InputError` as `check_element` does."""
    check_element(batched_spec)
    return tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), batched_spec)


def with_class_weight(source: Examples, class_weight: Mapping[int, float], one_hot: bool | None = None) -> Examples:
    """Returns the same examples, with the weights of their classes as sample weights.

    Args:
      source: examples whose y is one tensor: class indices (floats are rounded), one per example, [n] or [n, 1], or one
        per token, [n, length]; or vectors [n, classes], whose largest element is the class.
      class_weight: finite weights, at least 0, by class index, at least 0; other classes have weight 1.
      one_hot: whether y consists of vectors if it has several dims, the last of which is not 1; by default, whether y is
        floating-point.

    Raises:
      InputError: y is not one numeric tensor, a class or a weight is invalid, or, as in Keras, there are sample weights.
    """
    invalid = {label: weight for label, weight in class_weight.items() if label < 0 or not 0 <= weight < np.inf}
    if invalid or not class_weight:
        raise InputError(
            f"Classes and class weights must be finite and at least 0. Received: {invalid or class_weight}."
        )
    _, labels, *weights = source.element_spec
    if weights:
        raise InputError(
            "Class weights and sample weights are mutually exclusive. Received: both. Multiply the sample weights yourself."
        )
    if not isinstance(labels, tf.TensorSpec) or labels.dtype in (tf.string, tf.variant) or labels.dtype.is_complex:
        raise InputError(
            f"Class weights need one label for each example, a number or a one-hot vector. Received: y of {labels}. Pass "
            "sample weights instead."
        )
    has_vectors = labels.dtype.is_floating if one_hot is None else one_hot
    table = np.ones(max(class_weight) + 2, keras.config.floatx())  # the last entry is for all other classes
    table[list(class_weight)] = list(class_weight.values())

    def add_weights(x: Any, y: tf.Tensor) -> Element:
        label = _class_numbers(y, has_vectors)
        has_class_weight = (label >= 0) & (label < len(table) - 1)
        return x, y, tf.gather(table, tf.where(has_class_weight, label, len(table) - 1))

    return source.map(add_weights)


def _class_numbers(labels: tf.Tensor, has_vectors: bool) -> tf.Tensor:
    if labels.dtype == tf.bool:
        labels = tf.cast(labels, tf.int64)
    if labels.shape.rank > 1 and labels.shape[-1] == 1:
        labels = tf.squeeze(labels, -1)
    elif labels.shape.rank > 1 and has_vectors:
        return tf.argmax(labels, axis=-1)
    return tf.cast(tf.round(labels) if labels.dtype.is_floating else labels, tf.int64)


@dataclasses.dataclass(frozen=True)
class DatasetSplits:
    """Training and test examples, with their metadata.

    Attributes:
      name: name of the dataset, for display.
      train: training examples.
      test: test examples; None if there are none.
      input_shape: shape of one example's x, without a batch dim; () if x is a structure.
      classes: number of classes; None if y is not an integer label or the number is unknown.
      class_names: name of each class, by class index; empty if the classes have no names.
    """

    name: str
    train: Examples
    test: Examples | None
    input_shape: tuple[int | None, ...]
    classes: int | None
    class_names: tuple[str, ...] = ()
