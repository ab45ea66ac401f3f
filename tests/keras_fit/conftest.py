"""The comparison of what a model does on two replicas with plain Keras."""

from collections.abc import Callable
from typing import Any

import keras
import pytest

import tfdist
from tests.keras_fit.comparing import both, differences


@pytest.fixture
def as_one_device(float64: None, mirrored2: tfdist.Strategy) -> Callable[..., None]:
    """Asserts that a use of a model on two replicas has the numbers of plain Keras on one device."""

    def check(make: Callable[[], keras.Model], use: Callable[[keras.Model], Any], **options: Any) -> None:
        assert not differences(*both(mirrored2, make, use, **options))

    return check
