"""Wraps the inputs of a prediction, which has no targets, as examples."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.adapters import as_examples, is_data_loader, of_test
from tfdist.data.examples import Element, Examples, inputs_alone, with_elements
from tfdist.data.rebatched import from_dataset
from tfdist.data.source import ArraySource, Source
from tfdist.data.stream import StreamSource
from tfdist.data.structures import has_arrays
from tfdist.errors import InputError


def input_examples(x: Any, steps: int | None, batch_size: int) -> Examples:
    """Returns the data of a prediction as examples, whose targets, if there are any, are ignored.

    Args:
      x: an array, or a list, tuple or dict of arrays for a model with several inputs; a `tf.data.Dataset` of batches or of
        single examples: x, (x,), (x, y) or (x, y, sample_weight); a `keras.utils.PyDataset` of batches of these; a generator
        of batches (x,) or (x, y); examples; or a `DataSet`, for its test examples.
      steps: number of batches; required if the data has no end.
      batch_size: number of examples in a batch, for data that does not come in batches.

    Raises:
      InputError: the data has another form, or no end.
    """
    x = of_test(x)
    if isinstance(x, Examples):
        return x
    if isinstance(x, tf.data.Dataset):
        return _of_dataset(x, steps, batch_size)
    if isinstance(x, keras.utils.PyDataset):
        return as_examples(x, steps if x.num_batches is None else None)
    if isinstance(x, Iterator) or is_data_loader(x):
        return as_examples(x, steps)
    if not tf.nest.flatten(x) or isinstance(x, str | bytes) or callable(x):
        raise InputError(
            "`x` must be arrays, a tf.data.Dataset, a PyDataset, a generator, examples or a DataSet. Received: "
            f"{type(x).__name__}. Give an array of rows, or a list or dict of arrays for a model with several inputs."
        )
    return ArraySource(inputs_alone(_arrays(x)))


def _of_dataset(dataset: tf.data.Dataset, steps: int | None, batch_size: int) -> Examples:
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY and steps is None:
        raise InputError("Data without an end needs `steps`. Received: a tf.data.Dataset that repeats.")
    dataset = with_elements(dataset)
    is_batched = keras_internals.is_batched(dataset)
    if len(dataset.element_spec) > 3:
        dataset = dataset.map(inputs_alone)
    if is_batched:
        return from_dataset(dataset if steps is None else dataset.take(steps))
    return StreamSource(dataset if steps is None else dataset.take(steps * batch_size))


def _arrays(x: Any) -> Any:
    """Returns x with tuples instead of lists of arrays; nested numbers are an array."""
    if isinstance(x, dict):
        return {name: _arrays(part) for name, part in x.items()}
    if isinstance(x, tuple | list) and has_arrays(x):
        return tuple(_arrays(part) for part in x)
    return keras_internals.array_of(x)


class Padded(Source):
    """Repeats the last example of a source, so that their number is divisible."""

    def __init__(self, source: Source, divisor: int):
        """Initializes with the `source` and what is to divide the number of its examples."""
        self._source, self._last = source, source.size - 1
        self.size = -(-source.size // divisor) * divisor

    def fetch(self, indices: tf.Tensor) -> Element:
        """See base class."""
        return self._source._fetched(tf.minimum(indices, self._last))
