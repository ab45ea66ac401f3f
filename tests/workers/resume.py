"""Saves a case under its own name in a directory, waits until every saver has done so, and resumes from each."""

import pathlib
from typing import Any

import keras

import tfdist
from tests.end_to_end.resume import product


def work(
    strategy: tfdist.Strategy, directory: pathlib.Path, name: str, case: str, folder: str, *savers: str
) -> dict[str, Any]:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    home = pathlib.Path(folder)
    trainer = product.save(strategy, case, home / name)
    product.wait_for([home / name for name in savers], 200)
    return {name: product.go_on(trainer, case, home / name) for name in savers}
