"""Data sets by name."""

import inspect
from collections.abc import Callable

from tfdist.config.data_set_names import AFTER_COLON
from tfdist.data import images, synthetic, text, tfds
from tfdist.data.adapters import as_data_set
from tfdist.data.data_set import DataSet
from tfdist.data.formats import csv_file, image_folder, npz_file, tfrecord
from tfdist.errors import InputError, names_arguments
from tfdist.grammar import spec
from tfdist.grammar.user_code import call_own

CATALOG: dict[str, Callable[..., DataSet]] = {
    "csv": csv_file.csv,
    "digits": images.digits,
    "fashion_mnist": images.fashion_mnist,
    "images": image_folder.images,
    "mnist5k": images.mnist5k,
    "npz": npz_file.npz,
    "synthetic": synthetic.synthetic,
    "text": text.text,
    "tfds": tfds.prepared,
    "tfrecord": tfrecord.tfrecord,
}


@names_arguments
def load(name: str, data_dir: str | None = None) -> DataSet:
    """Loads a data set by name.

    Args:
      name: `digits`, `mnist5k`, `fashion_mnist`, `text(length=128)`, `synthetic:224x224x3` or `tfds:NAME`; your own files,
        `images:DIR`, `csv:FILE`, `npz:FILE` or `tfrecord:PATTERN`; or a user-defined `package.module:function`. Each may
        have arguments in parentheses. A user's function gets `data_dir` if it has this parameter, and returns what
        `as_data_set` accepts.
      data_dir: directory of data sets that are files.

    Raises:
      InputError: the name is unknown, its arguments are invalid, or its data or a required package is missing.
    """
    if not isinstance(name, str):
        raise InputError(
            f'The name of a data set must be a string, such as "digits". Received: {name!r:.60}. Pass arrays to fit directly.'
        )
    parsed = spec.parse(name)
    prefix, colon, rest = parsed.name.partition(":")
    if colon and AFTER_COLON.get(prefix):
        parsed = spec.Spec(prefix, {AFTER_COLON[prefix]: rest} | parsed.args)
    if parsed.name in CATALOG:
        return spec.call(CATALOG[parsed.name], parsed, data_dir=data_dir)
    if colon:
        return as_data_set(call_own("--dataset", spec.load_object(parsed.name), parsed, data_dir=data_dir), str(parsed))
    raise InputError(f"--dataset={name} is not known.{spec.nearest(parsed.name, CATALOG)}")


def takes_data_dir(name: str) -> bool:
    """Returns whether a data set's files may be in `data_dir`; True for a user's own."""
    prefix, _, _ = spec.parse(name).name.partition(":")
    return prefix not in CATALOG or "data_dir" in inspect.signature(CATALOG[prefix]).parameters
