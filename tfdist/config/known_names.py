"""Checks the names of models and data sets before anything that they name is imported."""

import os.path

from tfdist.errors import InputError
from tfdist.grammar.spec import nearest, parse
from tfdist.storage import path_of, storage_of

_OF_FILES = {".csv": "csv", ".npz": "npz", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord", ".tsv": "csv"}
_OF_TFDS = ("cifar10", "cifar100", "imagenet2012", "mnist")


def check_name(flag: str, text: str, known: tuple[str, ...]) -> None:
    """Checks the name in a value of a flag.

    Args:
      flag: name of the flag.
      text: its value, which `parse` accepts.
      known: the names that it may have, besides `package.module:function`. More follows those that end in a colon.

    Raises:
      InputError: the name is unknown.
    """
    name = parse(text).name
    if ":" not in name and name not in known and f"{name}:" not in known:
        names = [each.rstrip(":") for each in known]
        raise InputError(f"--{flag}={text} is not known.{nearest(name, names)} {_remedy(name, known)}")


def _is_directory(name: str) -> bool:
    path = path_of(name)
    return storage_of(path).is_directory(path)


def _remedy(name: str, known: tuple[str, ...]) -> str:
    kind = "images" if _is_directory(name) else _OF_FILES.get(os.path.splitext(name)[1], "")
    if kind and f"{kind}:" in known:
        return f"Write {kind}:{name}."
    if name in _OF_TFDS and "tfds:" in known:
        return f"Write tfds:{name}."
    module, _, attribute = name.rpartition(".")
    return f"Your own is {module or 'package.module'}:{attribute if module else 'function'}."
