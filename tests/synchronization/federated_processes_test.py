"""Clients on replicas in several processes give the weights and records of one device."""

import keras
import numpy as np
import pytest

import tfdist
from tests.workers import federated, running


@pytest.fixture
def reference(float64, tmp_path):
    return federated.work(tfdist.load_strategy("single", environment={}), tmp_path)


def assert_equal(found, wanted):
    (weights, records), (wanted_weights, wanted_records) = found, wanted
    for one, other in zip(weights, wanted_weights, strict=True):
        assert np.linalg.norm(one - other) <= 1e-9 * np.linalg.norm(other)
    np.testing.assert_allclose(records, wanted_records, rtol=1e-9)


@pytest.mark.parametrize("devices", [2, 3])
def test_mirrored(devices, reference, tmp_path):
    strategy = tfdist.load_strategy("mirrored", devices=devices, environment={})
    assert_equal(federated.work(strategy, tmp_path), reference)


@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "size"), [("horovod", 2), ("horovod", 3), ("multiworker", 2), ("multiworker", 3)])
def test_processes(strategy, size, reference, tmp_path):
    for found in running.outcomes("federated", strategy, size, tmp_path, seconds=300):
        assert_equal(found, reference)


def test_the_rate_of_a_round_is_that_of_the_schedule(reference):
    _, records = reference
    assert [record[4] for record in records] == pytest.approx([0.05 * 0.7**k for k in range(5)], rel=1e-6)
    assert keras.config.floatx() == "float64"
