"""Loads the dataset `images`: image files in one folder per class."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
import tensorflow as tf

from tfdist.config.dataset_files import checksum_of, find_path
from tfdist.data.examples import DatasetSplits, Element, Origins, without_targets
from tfdist.data.image_decoding import ImageDecoding, decoded_shape, image_decoding
from tfdist.data.reading_errors import first_unreadable
from tfdist.data.source import Source, split_indices
from tfdist.errors import InputError, nearest

_EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_TRAIN = "train"
_TEST_FOLDERS = ("test", "validation", "val")
_KIND = "images"


class ImageFiles(Source):
    """Image files, optionally with labels. They are read and decoded on demand, several batches in parallel."""

    def __init__(self, folder: str, paths: Sequence[str], labels: np.ndarray | None, decoding: ImageDecoding):
        """Stores the paths without reading the files.

        Args:
          folder: folder of the files; its path may differ between processes.
          paths: paths of the files, at least one.
          labels: class indices of the files, int32 [n]; None for examples without targets.
          decoding: conversion of the files to tensors.
        """
        self.size = len(paths)
        self._folder, self._path_list = folder, list(paths)
        self.origins = Origins("file", [path.removeprefix(folder).lstrip("/") for path in paths])
        self._decoding = decoding
        with tf.device("CPU:0"):
            self._paths = tf.constant(self._path_list)
            self._labels = None if labels is None else tf.constant(labels, tf.int32)

    def fetch(self, indices: tf.Tensor) -> Element:
        x = self._decoding.decode(tf.map_fn(tf.io.read_file, tf.gather(self._paths, indices)))
        return without_targets(x) if self._labels is None else (x, tf.gather(self._labels, indices))

    @property
    def checksum(self) -> int:
        """See base class. Covers the paths of the files relative to the folder."""
        return checksum_of("\0".join(path.removeprefix(self._folder) for path in self._path_list).encode())

    def explain(self, error: Exception) -> InputError | None:
        """See base class. Decodes files until one fails."""
        return first_unreadable(lambda index: _check_file(self._path_list[index], self._decoding), self.size)


def images(
    path: str,
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    crop_to_aspect_ratio: bool = False,
    validation_split: float = 0.0,
    labels: bool = True,
    data_dir: str | None = None,
) -> DatasetSplits:
    """Loads JPEG, PNG, BMP and GIF files, with one folder per class; x is float32 in [0, 1].

    Class indices are in the order of the folders' names. If the folder has a subfolder `train` with subfolders, these are
    the classes, and the test data is in the first of `test`, `validation` and `val` that exists next to `train`.

    Args:
      path: the folder.
      size: height and width to which images are resized, or one number for both; None if all have the same size.
      channels: 1 (gray), 3 (RGB) or 4 (RGBA).
      crop_to_aspect_ratio: whether resized images keep their aspect ratio, by cropping to their center.
      validation_split: fraction of the images, in [0, 1), to use as the test data; the same images in every run.
      labels: whether folders are classes. If False, for prediction, both the training and the test data are all images
        in the folder and its subfolders, without labels.
      data_dir: directory against which a relative path is resolved.

    Raises:
      InputError: a folder is missing or empty, the first image of a class cannot be decoded, or an argument is invalid.
    """
    folder = find_path(_KIND, path, data_dir, "folder")
    if not labels:
        paths = _image_files(folder)
        if not paths:
            raise InputError(
                f"The dataset {_KIND} must contain images ({', '.join(_EXTENSIONS)}). Received: {folder}, which has no images. "
                "Specify another folder."
            )
        decoding = image_decoding(size, channels, crop_to_aspect_ratio, paths[0], _read_file(paths[0]))
        source = ImageFiles(folder, paths, None, decoding)
        return DatasetSplits(f"{_KIND}:{path}", source, source, decoding.shape, None)
    train_folder, test_folder = os.path.join(folder, _TRAIN), None
    if os.path.isdir(train_folder) and _subfolders(train_folder):
        candidates = (os.path.join(folder, name) for name in _TEST_FOLDERS)
        test_folder = next(filter(os.path.isdir, candidates), None)
    else:
        train_folder = folder
    by_class = _files_by_class(train_folder)
    classes = tuple(by_class)
    paths, class_indices = _flatten(by_class, classes)
    decoding = image_decoding(size, channels, crop_to_aspect_ratio, paths[0], _read_file(paths[0]))
    for files in by_class.values():
        _check_file(files[0], decoding)
    train_indices, test_indices = split_indices(class_indices, validation_split, test_folder)
    parts = train_indices, test_indices
    source, split = (ImageFiles(folder, [paths[i] for i in part], class_indices[part], decoding) for part in parts)
    test = split if len(test_indices) else None
    if test_folder:
        test = ImageFiles(folder, *_flatten(_files_by_class(test_folder, classes), classes), decoding)
    return DatasetSplits(f"{_KIND}:{path}", source, test, decoding.shape, len(classes), classes)


def _files_by_class(folder: str, known_classes: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Returns the files in each class's folder, in sorted order; for test data, `known_classes` are the training classes."""
    classes = _subfolders(folder)
    if not classes:
        raise InputError(
            f"The dataset {_KIND} must be a folder with a subfolder of images for each class. Received: {folder}, which "
            f"has {len(_image_files(folder))} images but no subfolders. Move the images of each class into a separate "
            "subfolder or, for prediction, add labels=False."
        )
    files = {name: _image_files(os.path.join(folder, name)) for name in classes}
    unknown_classes = [] if known_classes is None else [n for n in classes if n not in known_classes and files[n]]
    if known_classes is not None and unknown_classes:
        raise InputError(
            f"The test data must have the classes of the training data. Received: {os.path.join(folder, unknown_classes[0])}."
            f"{nearest(unknown_classes[0], known_classes[:20])}"
        )
    empty_classes = [name for name, paths in files.items() if not paths]
    if empty_classes and (known_classes is None or len(empty_classes) == len(files)):
        folder_path = os.path.join(folder, empty_classes[0])
        raise InputError(
            f"The folder of a class must contain images ({', '.join(_EXTENSIONS)}). Received: {folder_path}, "
            "which has no images. Add images or remove the folder."
        )
    return files


def _subfolders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _image_files(folder: str) -> list[str]:
    """Returns the images in a folder and its subfolders, in sorted order.

    A folder that is reached several times is listed once, since a link may lead back to a parent folder.
    """
    paths, visited = [], set()
    with _explain_errors(folder):
        for directory, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
            if os.path.realpath(directory) in visited:
                folders.clear()
                continue
            visited.add(os.path.realpath(directory))
            folders[:] = [name for name in folders if not name.startswith(".")]
            images = (name for name in files if not name.startswith(".") and name.lower().endswith(_EXTENSIONS))
            paths += [os.path.join(directory, name) for name in images]
    return sorted(paths)


def _raise(error: OSError) -> NoReturn:
    raise error


def _flatten(by_class: Mapping[str, list[str]], classes: Sequence[str]) -> tuple[list[str], np.ndarray]:
    class_indices = {name: index for index, name in enumerate(classes)}
    pairs = [(path, class_indices[name]) for name, files in by_class.items() for path in files]
    return [path for path, _ in pairs], np.array([label for _, label in pairs], np.int32)


def _check_file(path: str, decoding: ImageDecoding) -> None:
    """Raises `InputError` if an image cannot be read or decoded, or does not have the size that `decoding` requires."""
    shape = decoded_shape(path, _read_file(path), decoding.channels)
    if not decoding.resizes and shape != decoding.shape:
        raise InputError(
            f"Images must all have the same size, unless they are resized. Received: {path} of {shape[0]} x {shape[1]} "
            f"pixels, and others of {decoding.height} x {decoding.width}. Add size={decoding.height}, for example."
        )


def _read_file(path: str) -> bytes:
    with _explain_errors(path), open(path, "rb") as file:
        return file.read()


@contextlib.contextmanager
def _explain_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"Images must be readable. Received: {path}: {error.strerror}.") from error
