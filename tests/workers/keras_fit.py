"""Fits the programs named in the arguments, in float64."""

import pathlib
from typing import Any

import keras

import tfdist
from tests.keras_fit.models import PROGRAMS, run


def work(strategy: tfdist.Strategy, directory: pathlib.Path, *programs: str) -> dict[str, Any]:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    outcomes = {}
    for program in programs:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            made = PROGRAMS[program]()
        tfdist.distribute(made.model)
        outcomes[program] = run(made)
    return outcomes
