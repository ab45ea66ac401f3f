"""Runs the cases of the conformance suite in DIRECTORY/cases.pickle."""

import pathlib
import pickle
from typing import Any

import keras

import tfdist


def work(strategy: tfdist.Strategy, directory: pathlib.Path, floatx: str) -> list[Any]:
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    from tfdist.testing import parity

    cases = pickle.loads((directory / "cases.pickle").read_bytes())
    return [parity.run_case(strategy, case) for case in cases]
