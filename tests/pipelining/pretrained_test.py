"""Pretrained weights of a whole model: each process of a pipeline keeps those of its stages."""

import json
import pathlib
import sys

import keras
import numpy as np
import pytest

from tests import processes
from tests.pipelining.pretrained_worker import model_of


@pytest.mark.processes
def test_each_process_keeps_the_weights_of_its_stages(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pretrained.weights.h5"
    keras.utils.set_random_seed(3)
    whole = model_of()
    whole.save_weights(path)
    expected = {variable.path: np.asarray(variable).tolist() for variable in whole.variables}
    with processes.job([sys.executable, "-m", "tests.pipelining.pretrained_worker", str(path)], 2) as job:
        ended = job.wait(300)
    assert [end.code for end in ended] == [0, 0], "\n".join(end.output for end in ended)
    ranks = [json.loads([line for line in end.output.splitlines() if line.startswith('{"')][-1]) for end in ended]
    for found in ranks:
        for when in ("scope", "outside", "after", "set"):
            assert found[when] and found[when].items() <= expected.items(), when
        assert found["read"]
        for refused in ("get", "save"):
            assert found[refused].startswith(
                "InputError: A process of a pipeline has the weights of its own stages only"
            )
    assert ranks[0]["after"].keys() | ranks[1]["after"].keys() == expected.keys()
