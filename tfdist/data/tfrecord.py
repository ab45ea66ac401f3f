"""Loads the dataset `tfrecord`: files of `tf.train.Example`, with random access by an index that is built on opening."""

import contextlib
import dataclasses
import math
import mmap
import os
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.config.dataset_files import checksum_of, matching_files
from tfdist.config.rules import split_outside_brackets
from tfdist.data.examples import DatasetSplits, Element
from tfdist.data.image_decoding import ImageDecoding, image_decoding, without_context
from tfdist.data.reading_errors import first_unreadable
from tfdist.data.source import Source, split_indices
from tfdist.errors import InputError, did_you_mean, nearest

# A record is its length (8 bytes), a checksum of the length (4), the data, and a checksum of the data (4). Building the
# index reads only the lengths, which takes some microseconds per record.

_LENGTH = struct.Struct("<Q")
_HEADER, _FOOTER = 12, 4


class RecordIndex(NamedTuple):
    """The positions of records in files."""

    files: tuple[str, ...]  # paths of the files
    file_indices: np.ndarray  # index of each record's file in `files`, int32 [records]
    record_indices: np.ndarray  # index of each record in its file, int64 [records]
    offsets: np.ndarray  # position of each record's data in its file, in bytes, int64 [records]
    lengths: np.ndarray  # size of each record's data, in bytes, int64 [records]

    def select(self, records: np.ndarray) -> "RecordIndex":
        """Returns the positions of the records with the given indices, int64 [n]."""
        return RecordIndex(self.files, *(values[records] for values in self[1:]))

    def read(self, records: np.ndarray) -> np.ndarray:
        """Returns the data of the records with the given indices, an array of `bytes` objects."""
        contents = np.empty(len(records), object)
        for i, record in enumerate(records):
            with open(self.files[self.file_indices[record]], "rb", buffering=0) as file:
                contents[i] = os.pread(file.fileno(), int(self.lengths[record]), int(self.offsets[record]))
        return contents

    def describe(self, record: int) -> str:
        """Returns a description of a record, for errors."""
        return f"record {self.record_indices[record]} of {self.files[self.file_indices[record]]}"


def record_index(files: Sequence[str]) -> RecordIndex:
    """Returns the positions of all records in `files`, in order.

    Raises:
      InputError: a file is not a complete, uncompressed TFRecord file, or there are no records.
    """
    ranges = [_ranges(file) for file in files]
    counts = [len(file_ranges) for file_ranges in ranges]
    if not sum(counts):
        raise InputError(f"TFRecord files must have records. Received: {len(files)} empty files, such as {files[0]}.")
    return RecordIndex(
        tuple(files),
        np.repeat(np.arange(len(files), dtype=np.int32), counts),
        np.concatenate([np.arange(count, dtype=np.int64) for count in counts]),
        *np.concatenate(ranges).T,
    )


def _ranges(path: str) -> np.ndarray:
    """Returns the offset and length of each record's data in a file, int64 [records, 2]."""
    ranges: list[int] = []
    end = 0
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            with (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else contextlib.nullcontext(b"") as content
            ):
                while end + _LENGTH.size <= size:
                    [length] = _LENGTH.unpack_from(content, end)
                    ranges += end + _HEADER, length
                    end += _HEADER + length + _FOOTER
    except OSError as error:
        raise InputError(f"TFRecord files must be readable. Received: {path}: {error.strerror}.") from error
    if end != size:
        raise InputError(
            "TFRecord files must be complete and uncompressed, so that records can be read in any order. Received: "
            f"{path}, in which the end of record {max(len(ranges) // 2 - 1, 0)} is missing. Write it again without compression."
        )
    return np.array(ranges, np.int64).reshape(-1, 2)


IMAGE, RAW = "image", "uint8"
_STORED_DTYPES = {"int64": tf.int64, "float32": tf.float32, "string": tf.string, IMAGE: tf.string, RAW: tf.string}
_FEATURE = re.compile(r"(?P<name>[\w./-]+)\s*:\s*(?P<kind>\w+)\s*(\[(?P<dims>[\d,\s]*)\])?")
_GRAMMAR = (
    "features must be at least two distinct, comma-separated NAME:TYPE or NAME:TYPE[DIMS], where TYPE is int64, float32, "
    "string, image (an encoded image, without DIMS) or uint8 (bytes of an array of shape DIMS, such as uint8[28,28,1])"
)
_FIELDS = {"bytes_list": "string", "float_list": "float32", "int64_list": "int64"}


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a record."""

    kind: str  # int64, float32, string, image or uint8
    shape: tuple[int, ...]  # shape of the feature in one example; () for an encoded image

    @property
    def spec(self) -> tf.io.FixedLenFeature:
        """The specification for `tf.io.parse_example`."""
        return tf.io.FixedLenFeature(() if self.kind == RAW else self.shape, _STORED_DTYPES[self.kind])


def parse_features(text: str) -> dict[str, Feature]:
    """Parses features, such as `image:image, label:int64`; raises `InputError` for invalid text or a single feature."""
    features: dict[str, Feature] = {}
    for part in split_outside_brackets(text, ",") if isinstance(text, str) else []:
        match = _FEATURE.fullmatch(part.strip())
        kind = match["kind"] if match else ""
        shape = tuple(int(dim) for dim in re.findall(r"\d+", match["dims"] or "")) if match else ()
        has_shape = {RAW: bool(shape), IMAGE: not shape}.get(kind, True) and math.prod(shape) > 0
        if not match or kind not in _STORED_DTYPES or match["name"] in features or not has_shape:
            hint = did_you_mean(kind, _STORED_DTYPES)
            raise InputError(f"{_GRAMMAR}. Received: {part.strip()!r} in features={text!r}.{hint}")
        features[match["name"]] = Feature(kind, shape)
    if len(features) < 2:
        raise InputError(f"{_GRAMMAR}. Received: features={text!r}.")
    return features


def check_record(record: bytes, features: Mapping[str, Feature], record_name: str) -> None:
    """Raises `InputError` unless a record is a serialized `tf.train.Example` with each feature, of its type and size."""
    try:
        values = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # protobuf has several implementations, each with its own error
        raise InputError(f"Records must be serialized tf.train.Example protos. Received: {record_name}.") from error
    kinds = {name: feature.kind for name, feature in features.items()}
    record_features = {name: _describe(value, kinds.get(name)) for name, value in sorted(values.items())}
    for name, feature in features.items():
        kind = RAW if feature.kind == RAW else feature.spec.dtype.name
        if record_features.get(name) != f"{kind}[{math.prod(feature.shape)}]":
            found_text = ", ".join(f"{name}:{text}" for name, text in record_features.items()) or "no features"
            raise InputError(
                "Every record must have each feature, with its type and number of values. Received: "
                f"{name}:{feature.kind}{list(feature.shape) or ''}, but {record_name} has {found_text}."
                f"{'' if name in record_features else did_you_mean(name, record_features)}"
            )


def _describe(feature: tf.train.Feature, kind: str | None) -> str:
    field = feature.WhichOneof("kind")
    values: Any = getattr(feature, field).value if field else ()
    if kind == RAW and field == "bytes_list" and len(values) == 1:
        return f"{RAW}[{len(values[0])}]"
    return f"{_FIELDS.get(field, 'nothing')}[{len(values)}]"


_KIND = "tfrecord"


class Records(Source):
    """Records in files. They are read, parsed and decoded on demand, several batches in parallel."""

    def __init__(
        self, index: RecordIndex, features: Mapping[str, Feature], label: str, decodings: Mapping[str, ImageDecoding]
    ):
        """Stores the arguments without reading records.

        Args:
          index: positions of the records, at least one.
          features: features to read, by name.
          label: name of the feature that is y. The others are x: a tensor, or a dict if there are several.
          decodings: decoding of each image feature, by name.
        """
        self.size = len(index.offsets)
        self._index, self._features, self._label, self._decodings = index, features, label, decodings

    def fetch(self, indices: tf.Tensor) -> Element:
        records = tf.numpy_function(self._index.read, [indices], tf.string, stateful=False)
        return self._parse(tf.ensure_shape(records, indices.shape))

    def _parse(self, records: tf.Tensor) -> Element:
        stored = tf.io.parse_example(records, {name: feature.spec for name, feature in self._features.items()})
        x = {name: self._decode(name, stored[name]) for name in self._features}
        y = x.pop(self._label)
        return (next(iter(x.values())) if len(x) == 1 else x), y

    def _decode(self, name: str, stored: tf.Tensor) -> tf.Tensor:
        feature = self._features[name]
        if feature.kind == IMAGE:
            return self._decodings[name].decode(stored)
        if feature.kind == RAW:
            pixels = tf.reshape(tf.io.decode_raw(stored, tf.uint8), [tf.shape(stored)[0], *feature.shape])
            return tf.cast(pixels, tf.float32) / 255
        return stored

    @property
    def checksum(self) -> int:
        """See base class. Covers the positions of the records."""
        return checksum_of(self._index.offsets.tobytes() + self._index.lengths.tobytes())

    def explain(self, error: Exception) -> InputError | None:
        """See base class. Parses records until one fails."""
        return first_unreadable(self._check, self.size)

    def _check(self, index: int) -> None:
        record_name = self._index.describe(index)
        try:
            [record] = self._index.read(np.array([index]))
            check_record(record, self._features, record_name)
            self._parse(tf.constant([record]))
        except (OSError, tf.errors.OpError) as error:
            cause = without_context(getattr(error, "message", str(error)))
            raise InputError(f"Records must be readable. Received: {record_name}: {cause}.") from error


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
) -> DatasetSplits:
    """Loads records of `tf.train.Example` from one or several files; images and byte arrays are float32 in [0, 1].

    Args:
      path: a file, or a pattern such as `train-*.tfrecord`; the files are used in sorted order.
      features: features to read from each record, such as `image:image, label:int64`: NAME:TYPE or NAME:TYPE[DIMS], where
        TYPE is int64, float32, string, image (an encoded image) or uint8 (the bytes of an array of shape DIMS).
      label: feature that is y; by default the last. The other features are x, a dict if there are several.
      classes: number of classes, for the model.
      size: height and width to which images are resized, or one number for both; None if all have the same size.
      channels: number of channels of images: 1 (gray), 3 (RGB) or 4 (RGBA).
      crop_to_aspect_ratio: whether resized images keep their aspect ratio, by cropping to their center.
      test: a file or pattern of the test data.
      validation_split: fraction of the records, in [0, 1), to use as the test data; the same records in every run.
      data_dir: directory against which relative paths are resolved.

    Raises:
      InputError: files are missing, compressed or damaged, or their first record has other features.
    """
    index = record_index(matching_files(_KIND, path, data_dir))
    [first_record] = index.read(np.array([0]))
    record_name = index.describe(0)
    if features is None:
        found_text = ", ".join(sorted(tf.train.Example.FromString(first_record).features.feature))
        raise InputError(
            f"The dataset {_KIND} needs the features to read from each record. Received no features. Add features=..., such "
            f'as features="image:image, label:int64"; {record_name} has {found_text or "no features"}.'
        )
    parsed = parse_features(features)
    target = list(parsed)[-1] if label is None else label
    if target not in parsed:
        raise InputError(f"label must be one of the features. Received: {label!r}.{nearest(str(label), parsed)}")
    check_record(first_record, parsed, record_name)
    values = tf.train.Example.FromString(first_record).features.feature
    decodings: dict[str, ImageDecoding] = {}
    for name in (name for name, feature in parsed.items() if feature.kind == IMAGE):
        image, image_name = values[name].bytes_list.value[0], f"{name} in {record_name}"
        decodings[name] = image_decoding(size, channels, crop_to_aspect_ratio, image_name, image)
    train_records, test_records = split_indices(np.zeros(len(index.offsets), np.int32), validation_split, test)
    test_index = record_index(matching_files(_KIND, test, data_dir)) if test else None
    if test_index is not None:
        check_record(test_index.read(np.array([0]))[0], parsed, test_index.describe(0))
    elif len(test_records):
        test_index, index = index.select(test_records), index.select(train_records)
    source = Records(index, parsed, target, decodings)
    test_source = None if test_index is None else Records(test_index, parsed, target, decodings)
    x = source.element_spec[0]
    shape = tuple(x.shape) if isinstance(x, tf.TensorSpec) else ()
    return DatasetSplits(f"{_KIND}:{path}", source, test_source, shape, classes)
