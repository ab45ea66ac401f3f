"""Comparison of structures of numbers by norms."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfdist
from tests.keras_fit.models import PROGRAMS, run

TOLERANCE = 1e-9
Compare = Callable[..., None]  # the fixture `as_one_device`


def differences(ours: Any, plain: Any, path: str = "") -> dict[str, float]:
    """Returns the relative differences that exceed rounding, by path in the structures."""
    if isinstance(plain, dict):
        assert list(ours) == list(plain), path
        pairs = [(f"{path}/{key}", ours[key], plain[key]) for key in plain]
    elif isinstance(plain, list | tuple):
        assert len(ours) == len(plain), path
        pairs = [(f"{path}/{i}", *both) for i, both in enumerate(zip(ours, plain, strict=True))]
    else:
        a, b = np.asarray(ours, "float64"), np.asarray(plain, "float64")
        assert a.shape == b.shape, path
        difference = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6))
        return {path: difference} if not difference <= TOLERANCE else {}
    return {key: value for pair in pairs for key, value in differences(pair[1], pair[2], pair[0]).items()}


def plain_run(name: str) -> dict[str, Any]:
    """Returns the results of a program with plain Keras on one device."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    return run(PROGRAMS[name]())


def both(
    strategy: tfdist.Strategy, make: Callable[[], keras.Model], use: Callable[[keras.Model], Any], **options: Any
) -> tuple[Any, Any]:
    """Returns the results of using a model, on replicas and with plain Keras."""
    found = []
    for ours in (True, False):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        if ours:
            with strategy.scope():
                model = make()
            tfdist.distribute(model, strategy, **options)
        else:
            model = make()
        found.append((use(model), model.get_weights()))
    return found[0], found[1]
