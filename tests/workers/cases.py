"""Runs the cases in DIRECTORY/cases.pickle by `run_case` of a module."""

import importlib
import pathlib
import pickle
from typing import Any

import keras

import tfdist


def work(strategy: tfdist.Strategy, directory: pathlib.Path, module: str, floatx: str) -> list[Any]:
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    run_case = importlib.import_module(module).run_case
    return [run_case(strategy, case) for case in pickle.loads((directory / "cases.pickle").read_bytes())]
