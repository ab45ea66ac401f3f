"""Runs the cases of tests of pipelines in DIRECTORY/cases.pickle, in float64."""

import pathlib
import pickle
from typing import Any

import keras

import tfdist


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> list[Any]:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    from tests.strategies import pipeline_cases

    return [pipeline_cases.run_case(strategy, case) for case in pickle.loads((directory / "cases.pickle").read_bytes())]
