"""Loads datasets by name, and defines the datasets `synthetic`, `text` and `tfds`."""

import inspect
import math
import os
import pathlib
import re
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import spec
from tfdist.config.dataset_files import COLON_ARGUMENTS
from tfdist.config.spec import call_user_function
from tfdist.data import array_files, image_folder, images, tfrecord
from tfdist.data.examples import DatasetSplits, Element
from tfdist.data.images import import_extra, scale_to_unit
from tfdist.data.inputs import as_dataset_splits
from tfdist.data.source import ArraySource, Source
from tfdist.data.stream import StreamSource
from tfdist.errors import InputError, names_arguments

_NOISE = 40  # standard deviation, relative to 255


def synthetic(
    shape: Sequence[int] | str = (28, 28, 1), classes: int = 10, size: int = 1024, test_size: int = 256, seed: int = 0
) -> DatasetSplits:
    """Creates examples of random classes, each the mean of its class plus noise, stored as bytes; x is float32 in [0, 1].

    Args:
      shape: shape of one example's x; as text, "224x224x3".
      classes: number of classes, at least 1.
      size: number of training examples, at least 1.
      test_size: number of test examples, at least 0.
      seed: seed of all random numbers.

    Raises:
      InputError: an argument is out of range.
    """
    dims = _dims(shape)
    if min(classes, size, test_size + 1) < 1:
        raise InputError(
            "For synthetic data, classes and size must be at least 1, and test_size at least 0. "
            f"Received: classes={classes}, size={size}, test_size={test_size}."
        )
    generator = np.random.Generator(np.random.PCG64(seed))
    means = generator.integers(64, 192, (classes, *dims), np.uint8)
    train = _draw(generator, means, size)
    test = _draw(generator, means, test_size) if test_size else None
    return DatasetSplits(f"synthetic:{'x'.join(map(str, dims))}", train, test, dims, classes)


def _draw(generator: np.random.Generator, means: np.ndarray, size: int) -> ArraySource:
    labels = generator.integers(0, len(means), size, np.int32)
    images = np.empty((size, *means.shape[1:]), np.uint8)
    # One image at a time, because the noise of all images would take 4 times their memory.
    for image, label in zip(images, labels, strict=True):
        noise = generator.standard_normal(image.shape, np.float32) * _NOISE
        image[...] = np.clip(means[label] + noise, 0, 255)
    return ArraySource((images, labels), scale_to_unit(255))


def _dims(shape: Sequence[int] | str) -> tuple[int, ...]:
    try:
        dims = tuple(int(dim) for dim in (shape.split("x") if isinstance(shape, str) else shape))
    except (TypeError, ValueError):
        dims = ()
    if not dims or math.prod(dims) < 1 or min(dims) < 1:
        raise InputError(f"Synthetic data needs a positive shape, as in synthetic:224x224x3. Received: {shape!r}.")
    return dims


_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_TEST_DIVISOR = 20  # the last 1/20 of the text is the test data


class TextSource(Source):
    """Consecutive windows of a text: x is `length` bytes, and y is the same window shifted by one byte; int32 [length]."""

    def __init__(self, text: np.ndarray, length: int):
        """Copies the text.

        Args:
          text: uint8 [n], longer than `length`. An incomplete window at the end is not used.
          length: length of a window, at least 1.

        Raises:
          InputError: the text is not longer than a window.
        """
        self.size = (len(text) - 1) // length if length > 0 else 0
        if self.size < 1:
            raise InputError(f"A text must be longer than a window. Received: {len(text)} bytes, length={length}.")
        self._length = length
        with tf.device("CPU:0"):
            self._text = tf.constant(np.asarray(text, np.uint8)[: self.size * length + 1])

    def fetch(self, indices: tf.Tensor) -> Element:
        positions = indices[:, None] * self._length + tf.range(self._length + 1, dtype=tf.int64)
        window = tf.cast(tf.gather(self._text, positions), tf.int32)
        return window[:, :-1], window[:, 1:]


def text(length: int = 128, max_bytes: int = 8_000_000) -> DatasetSplits:
    """Loads the .py files of Python's standard library, in sorted order; the last twentieth is the test data.

    All processes of a run must have the same version of Python, so that they have the same text.

    Args:
      length: number of bytes per example.
      max_bytes: maximum number of bytes to read.
    """
    content = np.frombuffer(_standard_library(max_bytes), np.uint8)
    test_start = len(content) - len(content) // _TEST_DIVISOR
    train, test = (TextSource(part, length) for part in (content[:test_start], content[test_start:]))
    return DatasetSplits("text", train, test, (length,), 256)


def _standard_library(max_bytes: int) -> bytes:
    content = bytearray()
    for directory, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(set(folders) - _EXCLUDED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py") and len(content) < max_bytes:
                content += pathlib.Path(directory, name).read_bytes()
    return bytes(content[: max(max_bytes, 0)])


_NAME = re.compile(r"\w+(/\w[\w.-]*)?(:[\d.]+)?")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_TEST_SPLITS = ("test", "validation")


def tfds_splits(name: str, data_dir: str | None = None) -> DatasetSplits:
    """Loads a dataset of tensorflow-datasets with (input, label) pairs; images are scaled to float32 in [0, 1].

    The data is read as a stream; see `StreamSource` for the cost.

    Args:
      name: `NAME`, `NAME/CONFIG`, `NAME:VERSION` or `NAME/CONFIG:VERSION`.
      data_dir: directory in which the dataset was prepared; by default $TFDS_DATA_DIR or ~/tensorflow_datasets.

    Raises:
      InputError: the dataset is not prepared in `data_dir` (the message contains the command that prepares it), or it
        has no (input, label) pairs, no training split, or inputs of different shapes.
    """
    folder = data_dir or os.environ.get("TFDS_DATA_DIR") or os.path.join("~", "tensorflow_datasets")
    # Checked first, because tfds.load waits forever if there is neither data nor a network.
    directory = _find_version(name, pathlib.Path(folder).expanduser())
    datasets = import_extra("tensorflow_datasets", f"The dataset tfds:{name}", "tfds")
    builder = datasets.builder_from_directory(str(directory))
    keys, splits = builder.info.supervised_keys, builder.info.splits
    if keys is None or len(keys) != 2:
        raise InputError(f"The dataset tfds:{name} must have (input, label) pairs. Received: supervised_keys={keys}.")
    if "train" not in splits:
        raise InputError(f"The dataset tfds:{name} must have a train split. Received: {', '.join(splits)}.")
    train = _stream_source(builder, name, "train")
    test = next((_stream_source(builder, name, split) for split in _TEST_SPLITS if split in splits), None)
    label = builder.info.features[keys[1]] if isinstance(keys[1], str) else None
    shape = tuple(train.element_spec[0].shape) if isinstance(train.element_spec[0], tf.TensorSpec) else ()
    return DatasetSplits(f"tfds:{name}", train, test, shape, getattr(label, "num_classes", None))


def _stream_source(builder: Any, name: str, split: str) -> StreamSource:
    dataset = builder.as_dataset(split=split, as_supervised=True, shuffle_files=False)
    spec = dataset.element_spec[0]
    if isinstance(spec, tf.TensorSpec) and not spec.shape.is_fully_defined():
        raise InputError(
            f"The inputs of tfds:{name} must all have the same shape. Received: {spec.shape}. Write a function that "
            "returns datasets of resized inputs, and pass it as --dataset=package.module:function."
        )
    source = StreamSource(dataset)
    return source.map(scale_to_unit(255)) if isinstance(spec, tf.TensorSpec) and spec.dtype == tf.uint8 else source


def _find_version(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns the directory of the newest version of a dataset that matches its name."""
    if not _NAME.fullmatch(name):
        raise InputError(f"tfds: must be followed by NAME or NAME/CONFIG, and optionally :VERSION. Received: {name!r}.")
    path, _, version = name.partition(":")
    info_files = (folder / path).glob("**/dataset_info.json")
    candidates = [info.parent for info in info_files if _VERSION.fullmatch(info.parent.name)]
    matches = [directory for directory in candidates if version in ("", directory.name)]
    if not matches:
        raise InputError(
            f"The dataset tfds:{name} must be prepared under --data_dir. Received: --data_dir={folder}, which has "
            f"{', '.join(sorted(str(path.relative_to(folder)) for path in candidates)) or 'no dataset of that name'}. Run "
            f"`tfds build {path} --data_dir={folder}` on a machine with network access."
        )
    parents = sorted({directory.parent for directory in matches})
    if len(parents) > 1:
        configs = ", ".join(f"tfds:{parent.relative_to(folder)}" for parent in parents)
        raise InputError(f"tfds:{name} is prepared in several configs, so one must be specified. Use one of {configs}.")
    return max(matches, key=lambda directory: [int(part) for part in directory.name.split(".")])


CATALOG: dict[str, Callable[..., DatasetSplits]] = {
    "csv": array_files.csv,
    "digits": images.digits,
    "fashion_mnist": images.fashion_mnist,
    "images": image_folder.images,
    "mnist5k": images.mnist5k,
    "npz": array_files.npz,
    "synthetic": synthetic,
    "text": text,
    "tfds": tfds_splits,
    "tfrecord": tfrecord.tfrecord,
}


@names_arguments
def load(name: str, data_dir: str | None = None) -> DatasetSplits:
    """Loads a dataset by name.

    Args:
      name: `digits`, `mnist5k`, `fashion_mnist`, `text(length=128)`, `synthetic:224x224x3` or `tfds:NAME`; for your own
        files, `images:DIR`, `csv:FILE`, `npz:FILE` or `tfrecord:PATTERN`; or a user-defined `package.module:function`.
        Each may have arguments in parentheses. A user's function gets `data_dir` if it has this parameter, and returns a
        value that `as_dataset_splits` accepts.
      data_dir: directory of the files, for datasets that are read from files.

    Raises:
      InputError: the name is unknown, its arguments are invalid, or its data or a required package is missing.
    """
    if not isinstance(name, str):
        raise InputError(
            f'The name of a dataset must be a string, such as "digits". Received: {name!r:.60}. Pass arrays to fit directly.'
        )
    dataset_spec = spec.parse(name)
    prefix, colon, argument = dataset_spec.name.partition(":")
    if colon and COLON_ARGUMENTS.get(prefix):
        dataset_spec = spec.Spec(prefix, {COLON_ARGUMENTS[prefix]: argument} | dataset_spec.args)
    if dataset_spec.name in CATALOG:
        return spec.call(CATALOG[dataset_spec.name], dataset_spec, data_dir=data_dir)
    if colon:
        return as_dataset_splits(
            call_user_function("--dataset", spec.load_object(dataset_spec.name), dataset_spec, data_dir=data_dir),
            str(dataset_spec),
        )
    raise InputError(f"--dataset={name} is not known.{spec.nearest(dataset_spec.name, CATALOG)}")


def takes_data_dir(name: str) -> bool:
    """Returns whether a dataset may read files in `data_dir`; True for a user-defined dataset."""
    prefix, _, _ = spec.parse(name).name.partition(":")
    return prefix not in CATALOG or "data_dir" in inspect.signature(CATALOG[prefix]).parameters
