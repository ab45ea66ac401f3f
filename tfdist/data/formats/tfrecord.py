"""TFRecord files of `tf.train.Example`, with random access by an index that is built when they are opened."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config.data_set_files import checksum_of, matching_files
from tfdist.data.data_set import DataSet
from tfdist.data.examples import Element
from tfdist.data.formats.feature_spec import IMAGE, RAW, Feature, check_record, parse_features
from tfdist.data.formats.image_decoding import ImageDecoding, image_decoding, without_context
from tfdist.data.formats.record_index import RecordIndex, record_index
from tfdist.data.reading_errors import first_unreadable
from tfdist.data.source import Source
from tfdist.data.split import held_out
from tfdist.errors import InputError
from tfdist.grammar.spec import nearest

_KIND = "tfrecord"


@dataclasses.dataclass(frozen=True)
class RecordParser:
    """Turns records into examples.

    Attributes:
      features: what is read of a record, by name.
      label: name of the feature that is y; the others are x: a tensor, or a dict if there are several.
      decodings: how images are decoded, by feature.
    """

    features: Mapping[str, Feature]
    label: str
    decodings: Mapping[str, ImageDecoding]

    def parsed(self, records: tf.Tensor) -> Element:
        """Returns a batch of examples: string [n] to (x, y)."""
        stored = tf.io.parse_example(records, {name: feature.stored for name, feature in self.features.items()})
        values = {name: self._value(name, stored[name]) for name in self.features}
        y = values.pop(self.label)
        return (next(iter(values.values())) if len(values) == 1 else values), y

    def _value(self, name: str, stored: tf.Tensor) -> tf.Tensor:
        feature = self.features[name]
        if feature.kind == IMAGE:
            return self.decodings[name].decoded(stored)
        return feature.of_bytes(stored) if feature.kind == RAW else stored


class Records(Source):
    """Records of files; read, parsed and decoded when they are used, several batches in parallel."""

    def __init__(self, index: RecordIndex, parser: RecordParser):
        """Keeps the index.

        Args:
          index: where the records are; at least one.
          parser: turns records into examples.
        """
        self.size = len(index.offset)
        self._index, self._parser = index, parser

    def fetch(self, indices: tf.Tensor) -> Element:
        """See base class."""
        records = tf.numpy_function(self._index.read, [indices], tf.string, stateful=False)
        return self._parser.parsed(tf.ensure_shape(records, indices.shape))

    @property
    def checksum(self) -> int:
        """See base class; of the places of the records."""
        return checksum_of(self._index.offset.tobytes() + self._index.length.tobytes())

    def explain(self, error: Exception) -> InputError | None:
        """See base class; parses records until one fails."""
        return first_unreadable(self._check, self.size)

    def _check(self, number: int) -> None:
        """Raises `InputError` if a record cannot be read or parsed."""
        where = self._index.described(number)
        try:
            [record] = self._index.read(np.array([number]))
            check_record(record, dict(self._parser.features), where)
            self._parser.parsed(tf.constant([record]))
        except (OSError, tf.errors.OpError) as error:
            cause = without_context(getattr(error, "message", str(error)))
            raise InputError(f"Records must be readable. Received: {where}: {cause}.") from error


def tfrecord(
    path: str,
    features: str | None = None,
    label: str | None = None,
    classes: int | None = None,
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    crop_to_aspect_ratio: bool = False,
    test: str | None = None,
    validation_split: float = 0.0,
    data_dir: str | None = None,
) -> DataSet:
    """Records of `tf.train.Example` in one or several files; images and arrays of bytes are float32 in [0, 1].

    Args:
      path: a file, or a pattern such as `train-*.tfrecord`; the files are used in sorted order.
      features: what is read of a record, such as `image:image, label:int64`: NAME:TYPE or NAME:TYPE[DIMS], where TYPE is
        int64, float32, string, image (an encoded image) or uint8 (the bytes of an array of shape DIMS).
      label: feature that is y; by default the last. The others are x, a dict if there are several.
      classes: number of classes, for the model.
      size: height and width to which images are resized, or one number for both; None if all have one size.
      channels: channels of images: 1 (gray), 3 (RGB) or 4 (RGBA).
      crop_to_aspect_ratio: whether resized images keep their aspect ratio and lose what is beyond the middle.
      test: a file or pattern of the test part.
      validation_split: fraction of the records, in [0, 1), that becomes the test part; the same in every run.
      data_dir: folder in which relative paths are looked for.

    Raises:
      InputError: files are missing, compressed or damaged, or their first record has other features.
    """
    if test and validation_split:
        raise InputError(
            f"Give test or validation_split, not both. Received: test={test!r}, validation_split={validation_split}."
        )
    index = record_index(matching_files(_KIND, path, data_dir))
    [first] = index.read(np.array([0]))
    parser = _parser(features, label, first, index.described(0), (size, channels, crop_to_aspect_ratio))
    other = record_index(matching_files(_KIND, test, data_dir)) if test else None
    if other is not None:
        check_record(other.read(np.array([0]))[0], dict(parser.features), other.described(0))
    else:
        kept, held = held_out(np.zeros(len(index.offset), np.int32), validation_split)
        if len(held):
            other, index = index.part(held), index.part(kept)
    source = Records(index, parser)
    x = source.element_spec[0]
    return DataSet(
        f"{_KIND}:{path}",
        source,
        None if other is None else Records(other, parser),
        tuple(x.shape) if isinstance(x, tf.TensorSpec) else (),
        classes,
    )


def _parser(features: Any, label: Any, first: bytes, where: str, images: tuple[Any, Any, Any]) -> RecordParser:
    if features is None:
        there = ", ".join(sorted(tf.train.Example.FromString(first).features.feature))
        raise InputError(
            f"The data set {_KIND} needs the features to read from each record. Received: none. Add features=..., such as "
            f'features="image:image, label:int64"; {where} has {there or "none"}.'
        )
    found = parse_features(features)
    target = list(found)[-1] if label is None else label
    if target not in found:
        raise InputError(f"label must be one of the features. Received: {label!r}.{nearest(str(label), found)}")
    check_record(first, found, where)
    values = tf.train.Example.FromString(first).features.feature
    decodings = {
        name: image_decoding(*images, f"{name} in {where}", values[name].bytes_list.value[0])
        for name, feature in found.items()
        if feature.kind == IMAGE
    }
    return RecordParser(found, target, decodings)
