"""`tfdist.find_batch_size` tries a function in processes of its own, under a memory limit."""

import time

import numpy as np
import psutil
import pytest

import tfdist
from tests.launcher.spawn_test import by_value
from tfdist.errors import InputError, TrialError

pytestmark = pytest.mark.processes

pytest.importorskip("cloudpickle")  # the new processes cannot import this file's functions
MIB = 2**20


@by_value
def allocate(batch_size, mib, fails=0):
    kept = bytearray(batch_size * mib * 2**20)
    kept[:: 2**12] = b"x" * len(kept[:: 2**12])  # touches every page
    time.sleep(0.3)
    if batch_size == fails:
        raise ValueError(f"no batch of {batch_size}")
    return 10.0 * batch_size


@by_value
def allocate_for_gpu(batch_size):
    if batch_size > 8:
        raise MemoryError("a device has no memory left")
    return np.float32(batch_size)  # as of NumPy's arithmetic


@by_value
def say_nothing(batch_size):
    return None


@pytest.mark.full
def test_the_largest_size_within_the_limit_is_found():
    before = psutil.Process().children(recursive=True)
    found = tfdist.find_batch_size(allocate, 4, args=(100,), max=16, memory="1200MiB")
    assert [trial.batch_size for trial in found.trials] == [4, 8, 12, 16]
    assert [trial.failure for trial in found.trials] == ["", "", "more than 1.2 GiB", "more than 1.2 GiB"]
    assert found.largest == 8 and found.fastest.batch_size == 8 and found.fastest.examples_per_second == 80.0
    assert all(trial.memory_bytes > trial.batch_size * 100 * MIB for trial in found.usable_trials)
    assert psutil.Process().children(recursive=True) == before


def test_a_failed_allocation_is_a_size_that_does_not_fit():
    found = tfdist.find_batch_size(allocate_for_gpu, np.int64(4), max=np.int64(16))
    assert found.largest == 8 and [trial.batch_size for trial in found.trials if trial.failure] == [12, 16]


@pytest.mark.smoke
def test_errors_of_a_trial_are_errors_of_the_search():
    failed = "batch size 2 failed because rank 0 ended with code 1 .failed.: ValueError: no batch of 2"
    with pytest.raises(TrialError, match=failed):
        tfdist.find_batch_size(allocate, 1, args=(1,), kwargs={"fails": 2}, max=4)


@pytest.mark.full
def test_a_function_must_return_its_speed():
    with pytest.raises(InputError, match="must return the examples per second. Received: None on rank 0"):
        tfdist.find_batch_size(say_nothing, 1, max=4)


def test_wrong_arguments():
    with pytest.raises(InputError, match="batch_size must be an integer from 1 to max. Received: 8, with max=4"):
        tfdist.find_batch_size(allocate, 8, max=4)
    with pytest.raises(InputError, match=r'^launcher must be known. Received: "mpi"'):
        tfdist.find_batch_size(allocate, 8, max=8, launcher="mpi")
