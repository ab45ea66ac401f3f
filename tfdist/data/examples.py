"""`Examples`, the interface between data sets and input pipelines; class weights."""

import abc
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.row_partition import RowPartition, without_absent
from tfdist.errors import InputError

Element = tuple[Any, ...]  # (x, y) or (x, y, sample_weight) of structures of tensors
# (batched x, y and, if there is one, sample_weight) -> the same.
Transform = Callable[..., Element]


def identity(*element: Any) -> Element:
    """Returns its arguments: the identity transform."""
    return element


def chain(first: Transform, second: Transform) -> Transform:
    """Returns the transform that applies `first`, then `second`."""
    with_autograph = keras_internals.with_autograph
    return lambda *element: with_autograph(second)(*with_autograph(first)(*element))


class Origins(NamedTuple):
    """The origin of each example."""

    kind: str  # what a name denotes: a "file", or a "line" of a file
    names: Sequence[str] | Sequence[int]  # a name for each example, in their natural order


class Examples(abc.ABC):
    """A finite number of examples in a natural order, each (x, y) or (x, y, sample_weight), whose parts are structures.

    Attributes:
      size: number of examples per epoch, at least 1.
      batch_size: rows of the batches in which the examples come; None if they do not come in batches.
      rows: number of examples in one pass over the data, if it may be less than `size`.
      is_reiterable: whether each iterator begins with the first example; otherwise all share one stream.
      batch_text: description of the examples of a step that does not use a batch of the batch size; otherwise "".
      origins: the origin of each example; None if unknown.
    """

    size: int
    batch_text: str = ""
    batch_size: int | None = None
    rows: int | None = None
    is_reiterable: bool = True
    origins: Origins | None = None
    _transform: Transform = staticmethod(identity)  # applied to batches
    _shuffle: bool = True  # whether each epoch has an order of its own

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

    @property
    def sample(self) -> "Examples":
        """Similar examples that can be read at any time, while a pipeline reads these."""
        return self

    @property
    def checksum(self) -> int | None:
        """A checksum of data that should be the same on every process, in [-2**63, 2**63); None if there is none."""
        return None

    def in_order(self) -> Self:
        """Returns the same examples, in their natural order in every epoch."""
        return self._copy_with(_shuffle=False)

    def preview(self, rows: int) -> Element:
        """Returns some examples, to check them before training; only `sample` can be read at any time.

        Args:
          rows: number of examples that may be read, at least 1; more if they are in memory.
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
        """Returns the cause of a TensorFlow error that was raised while reading examples; None if unknown.

        Called after a run has failed, so it may search for an example that cannot be read.
        """
        return None


class WrappedExamples(Examples):
    """Examples that delegate to other examples what a subclass does not override."""

    def __init__(self, examples: Examples, size: int):
        """Wraps examples, of which `size` count as an epoch."""
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

    An evaluation uses the first examples.
    """

    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        batches = self._examples.indexed_batches(partition, seed)
        return batches if partition.total is None else batches.take(partition.elements)


NO_TARGETS = ()  # the y of examples that have none


def without_targets(*x: Any) -> Element:
    """Returns (x, y) without targets, given the parts of an element that is x, (x,) or a tuple of inputs."""
    return x[0] if len(x) == 1 else x, NO_TARGETS


def as_element(batch: Any) -> Element:
    """Returns a batch or an example in one of the forms that Keras accepts as a plain tuple (x, y) or (x, y, sample_weight).

    It may be a list or a named tuple, or x alone or (x,), which has no targets; y and sample_weight may be None.
    """
    batch = without_absent(batch)
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return parts if len(parts) > 1 else without_targets(*parts)


def map_to_elements(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set with `as_element` applied to its elements."""
    spec = dataset.element_spec
    if type(spec) is tuple:
        return dataset.map(lambda *parts: as_element(parts)) if len(spec) == 1 or _is_absent(spec[-1]) else dataset
    return dataset.map(as_element)


def check_element(element: Any) -> None:
    """Checks that an element is (x, y) or (x, y, sample_weight).

    Raises:
      InputError: the element is something else.
    """
    if not (isinstance(element, tuple) and len(element) in (2, 3)):
        kind = type(element).__name__
        received = f"{kind} of {len(element)}" if isinstance(element, tuple | list | dict) else kind
        raise InputError(
            f"Examples must be tuples (x, y) or (x, y, sample_weight). Received: {received}. Structures go inside x and y."
        )
    for name, part in zip(("x", "y", "sample_weight"), element, strict=False):
        if any(map(_is_absent, tf.nest.flatten(part))):
            raise InputError(f"Examples must consist of arrays. Received: {name} with None in it. Leave that out.")


def _is_absent(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, tf.NoneTensorSpec | tf.OptionalSpec)


def unbatched_spec(batched_spec: Any) -> Any:
    """Drops the batch dim of a data set's element_spec.

    Raises:
      InputError: an element is not (x, y) or (x, y, sample_weight).
    """
    check_element(batched_spec)
    return tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), batched_spec)


def with_class_weight(source: Examples, class_weight: Mapping[int, float], one_hot: bool | None = None) -> Examples:
    """Returns the same examples, with the weights of their classes as sample weights.

    Args:
      source: examples whose y is one tensor of class numbers, which are rounded: a number per example, [n] or [n, 1], or per
        token, [n, length]; or of vectors [n, classes], whose largest element is the class.
      class_weight: finite weights, at least 0, by class, at least 0; other classes have weight 1.
      one_hot: whether y with more than one dim, the last of them not 1, consists of vectors; by default, if it is floating.

    Raises:
      InputError: y is not one tensor of numbers, a class or a weight is negative, or, as in Keras, there are sample weights.
    """
    invalid = {label: weight for label, weight in class_weight.items() if label < 0 or not 0 <= weight < np.inf}
    if invalid or not class_weight:
        raise InputError(
            f"Classes and class weights must be finite and at least 0. Received: {invalid or class_weight}."
        )
    _, labels, *weights = source.element_spec
    if weights:
        raise InputError("Give class weights or sample weights. Received: both. Multiply the sample weights yourself.")
    if not isinstance(labels, tf.TensorSpec) or labels.dtype in (tf.string, tf.variant) or labels.dtype.is_complex:
        raise InputError(
            f"Class weights need one label for each example, a number or a one-hot vector. Received: y of {labels}. Give "
            "sample weights."
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
class DataSet:
    """A data set.

    Attributes:
      name: name in the catalog, for display.
      train: training examples.
      test: test examples; None if there are none.
      input_shape: shape of one example's x, without a batch dim; () if x is a structure.
      classes: number of classes; None if y is not an integer label or the number is unknown.
      class_names: names of the classes, in the order of their numbers; empty if they have none.
    """

    name: str
    train: Examples
    test: Examples | None
    input_shape: tuple[int | None, ...]
    classes: int | None
    class_names: tuple[str, ...] = ()
