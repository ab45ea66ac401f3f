"""The number of backward passes per step."""

import numpy as np
import pytest

from tfdist.errors import InputError
from tfdist.horovod.accumulation import Accumulation


def test_integers_of_numpy_are_those_of_python():
    assert type(Accumulation(np.int64(3), average=True).passes) is int


@pytest.mark.parametrize("passes", [True, 0, 1.5])
def test_others_are_refused(passes):
    with pytest.raises(InputError, match=f"backward_passes_per_step must be an integer .* Received: {passes}"):
        Accumulation(passes, average=True)
