"""Data sets of tensorflow-datasets that have been prepared on this machine. Nothing is downloaded."""

import os
import pathlib
import re
from typing import Any

import tensorflow as tf

from tfdist.data.data_set import DataSet
from tfdist.data.images import scaled
from tfdist.data.optional_packages import extra
from tfdist.data.stream import StreamSource
from tfdist.errors import InputError

_NAME = re.compile(r"\w+(/\w[\w.-]*)?(:[\d.]+)?")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_TEST_SPLITS = ("test", "validation")


def prepared(name: str, data_dir: str | None = None) -> DataSet:
    """A data set with (input, label) pairs; images are scaled to float32 in [0, 1].

    It is read as a stream: see `StreamSource` for the cost.

    Args:
      name: `NAME`, `NAME/CONFIG`, `NAME:VERSION` or `NAME/CONFIG:VERSION`.
      data_dir: directory in which it was prepared; by default $TFDS_DATA_DIR or ~/tensorflow_datasets.

    Raises:
      InputError: it is not prepared there (the command to run is named), or has no pairs, no training split, or inputs
        of different shapes.
    """
    folder = data_dir or os.environ.get("TFDS_DATA_DIR") or os.path.join("~", "tensorflow_datasets")
    # Checked first because, if there is neither data nor a network, tfds.load waits forever.
    found = _find(name, pathlib.Path(folder).expanduser())
    datasets = extra("tensorflow_datasets", f"The data set tfds:{name}", "tfds")
    builder = datasets.builder_from_directory(str(found))
    keys, splits = builder.info.supervised_keys, builder.info.splits
    if keys is None or len(keys) != 2:
        raise InputError(f"The data set tfds:{name} must have pairs (input, label). Received: {keys}.")
    if "train" not in splits:
        raise InputError(f"The data set tfds:{name} must have a split train. Received: {', '.join(splits)}.")
    train = _source(builder, name, "train")
    test = next((_source(builder, name, split) for split in _TEST_SPLITS if split in splits), None)
    label = builder.info.features[keys[1]] if isinstance(keys[1], str) else None
    shape = tuple(train.element_spec[0].shape) if isinstance(train.element_spec[0], tf.TensorSpec) else ()
    return DataSet(f"tfds:{name}", train, test, shape, getattr(label, "num_classes", None))


def _source(builder: Any, name: str, split: str) -> StreamSource:
    dataset = builder.as_dataset(split=split, as_supervised=True, shuffle_files=False)
    spec = dataset.element_spec[0]
    if isinstance(spec, tf.TensorSpec) and not spec.shape.is_fully_defined():
        raise InputError(
            f"The inputs of tfds:{name} must all have one shape. Received: {spec.shape}. Write a function that returns "
            "data sets with them resized, and give it as --dataset=package.module:function."
        )
    source = StreamSource(dataset)
    return source.map(scaled(255)) if isinstance(spec, tf.TensorSpec) and spec.dtype == tf.uint8 else source


def _find(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns the directory of the newest version that matches the name."""
    if not _NAME.fullmatch(name):
        raise InputError(f"tfds: must be followed by NAME or NAME/CONFIG, and optionally :VERSION. Received: {name!r}.")
    path, _, version = name.partition(":")
    infos = (folder / path).glob("**/dataset_info.json")
    known = [info.parent for info in infos if _VERSION.fullmatch(info.parent.name)]
    wanted = [found for found in known if version in ("", found.name)]
    if not wanted:
        raise InputError(
            f"The data set tfds:{name} must be prepared under --data_dir. Received: --data_dir={folder}, which has "
            f"{', '.join(sorted(str(found.relative_to(folder)) for found in known)) or 'nothing of that name'}. Run "
            f"`tfds build {path} --data_dir={folder}` on a machine with network access."
        )
    parents = sorted({found.parent for found in wanted})
    if len(parents) > 1:
        configs = ", ".join(f"tfds:{found.relative_to(folder)}" for found in parents)
        raise InputError(f"tfds:{name} is prepared in several configs. Received: no config. Use one of {configs}.")
    return max(wanted, key=lambda found: [int(part) for part in found.name.split(".")])
