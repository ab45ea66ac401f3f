"""Parses what the records of TFRecord files contain: `image:image, label:int64`."""

import dataclasses
import math
import re

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.grammar.rules import split_outside_brackets
from tfdist.grammar.spec import did_you_mean

IMAGE, RAW = "image", "uint8"
_STORED = {"int64": tf.int64, "float32": tf.float32, "string": tf.string, IMAGE: tf.string, RAW: tf.string}
_FEATURE = re.compile(r"(?P<name>[\w./-]+)\s*:\s*(?P<kind>\w+)\s*(\[(?P<dims>[\d,\s]*)\])?")
_GRAMMAR = (
    "features are comma-separated NAME:TYPE or NAME:TYPE[DIMS], where TYPE is int64, float32, string, image (an encoded "
    "image) or uint8 (bytes of an array)"
)


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a record.

    Attributes:
      kind: int64, float32, string, image or uint8.
      shape: shape of one example; of an image, ().
    """

    kind: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tf.io.FixedLenFeature:
        """How it is stored in a record."""
        return tf.io.FixedLenFeature(() if self.kind == RAW else self.shape, _STORED[self.kind])

    def of_bytes(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the arrays that are stored as bytes, scaled to float32 in [0, 1]: string [n] to [n, *shape]."""
        flat = tf.io.decode_raw(values, tf.uint8)
        return tf.cast(tf.reshape(flat, [tf.shape(values)[0], *self.shape]), tf.float32) / 255


def parse_features(text: str) -> dict[str, Feature]:
    """Parses features.

    Args:
      text: such as `image:image, label:int64` or `pixels:uint8[28,28,1], label:int64`.

    Raises:
      InputError: `text` does not follow the grammar, or has fewer than two features.
    """
    features: dict[str, Feature] = {}
    for part in split_outside_brackets(text, ",") if isinstance(text, str) else []:
        found = _FEATURE.fullmatch(part.strip())
        if not found:
            raise InputError(f"{_GRAMMAR}. Received: {part.strip()!r} in features={text!r}.")
        name, kind = found["name"], found["kind"]
        if kind not in _STORED:
            raise InputError(f"{_GRAMMAR}. Received: {kind!r} in features={text!r}.{did_you_mean(kind, _STORED)}")
        if name in features:
            raise InputError(f"A feature is given once. Received: {name!r} twice in features={text!r}.")
        shape = tuple(int(dim) for dim in (found["dims"] or "").replace(" ", "").split(",") if dim)
        if (kind == RAW) != bool(shape) and kind in (RAW, IMAGE) or math.prod(shape) < 1:
            raise InputError(
                f"uint8 needs the shape of the array, such as uint8[28,28,1], and image has none. Received: {part.strip()!r}."
            )
        features[name] = Feature(kind, shape)
    if len(features) < 2:
        raise InputError(
            f"A record needs at least two features, of which the last is the label: {_GRAMMAR}. Received: {text!r}."
        )
    return features


def check_record(record: bytes, features: dict[str, Feature], where: str) -> None:
    """Checks that a record has the features.

    Args:
      record: serialized `tf.train.Example`.
      features: what it must have.
      where: which record it is, for the error.

    Raises:
      InputError: the record is something else, or a feature is missing or has another type or number of values.
    """
    try:
        there = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # protobuf has several implementations, each with its own error
        raise InputError(f"Records must be serialized tf.train.Example. Received: {where}.") from error
    known = {name: _described(value) for name, value in sorted(there.items())}
    listed = ", ".join(f"{name}:{kind}[{count}]" for name, (kind, count) in known.items()) or "no features"
    for name, feature in features.items():
        if name not in known:
            raise InputError(
                f"Each feature must be in the records. Received: {name!r}, but {where} has {listed}.{did_you_mean(name, known)}"
            )
        kind, count = known[name]
        stored = feature.stored
        if kind != stored.dtype.name or count != math.prod(stored.shape):
            raise InputError(
                f"Each feature must have the type and the number of values that records have. Received: {name}:{feature.kind}"
                f"{list(feature.shape) or ''}, but {where} has {name}:{kind}[{count}]."
            )
        if feature.kind == RAW and len(there[name].bytes_list.value[0]) != math.prod(feature.shape):
            raise InputError(
                f"A uint8 feature must have as many bytes as its shape. Received: {name}:uint8{list(feature.shape)}, but "
                f"{where} has {len(there[name].bytes_list.value[0])} bytes."
            )


def _described(feature: tf.train.Feature) -> tuple[str, int]:
    """Returns type and number of values."""
    kinds = {"bytes_list": "string", "float_list": "float32", "int64_list": "int64"}
    field = feature.WhichOneof("kind")
    return (kinds[field], len(getattr(feature, field).value)) if field else ("nothing", 0)
