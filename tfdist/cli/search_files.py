"""Files of a search: find/NAME.json and find/NAME.png in the output directory."""

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError
from tfdist.reporting.file_errors import must_write
from tfdist.reporting.run_directory import RunDirectory
from tfdist.storage import StoragePath, path_of, storage_of

_SCHEMA = 1  # of NAME.json; increased when a key is renamed or removed, or changes its meaning


def directory(config: TrainConfig) -> StoragePath:
    """Returns the output directory of a search, which is named after data set and model if it is not given."""
    names = (
        "".join(c if c.isalnum() or c in "._" else "_" for c in text.partition("(")[0])
        for text in (config.dataset, config.model)
    )
    name = f"runs/{'-'.join(names)}-find-{time.strftime('%Y%m%d-%H%M%S')}"
    return path_of(os.path.expanduser(config.output_dir or name))


def check(folder: StoragePath) -> None:
    """Checks that a run could begin where a search is going to write, and creates its directory.

    Raises:
      InputError: there is a run, or the directory cannot be written.
    """
    if RunDirectory(folder.parent).is_run:
        raise InputError(
            f"A search begins with new weights and needs an output directory without a run. Received: {folder.parent}, "
            "which is one. Give another --output_dir."
        )
    RunDirectory.check(folder.parent)
    RunDirectory(folder).make()


def write(folder: StoragePath, name: str, found: Mapping[str, Any], config: TrainConfig, picture: bytes) -> None:
    """Writes the result of a search.

    Args:
      folder: the directory.
      name: what was searched for, the name of the files.
      found: values of JSON.
      config: flags, which are written too, without the directory.
      picture: a PNG.
    """
    flags = {name: value for name, value in dataclasses.asdict(config).items() if name != "output_dir"}
    facts = {"schema": _SCHEMA, **found, "flags": flags}
    for path, contents in (
        (folder / f"{name}.json", f"{json.dumps(facts, indent=2)}\n".encode()),
        (folder / f"{name}.png", picture),
    ):
        with must_write(path):
            storage_of(path).replace(path, contents)
