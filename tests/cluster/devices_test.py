"""Devices of this process: names, limits, and settings that can no longer be changed."""

import pytest
import tensorflow as tf

from tfdist.cluster import devices
from tfdist.cluster.environment import Cluster
from tfdist.errors import InputError

GPUS = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]


@pytest.fixture
def gpus(monkeypatch):
    """Fakes two GPUs for devices.py; records their settings."""
    real = tf.config.list_physical_devices
    noted = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: GPUS if kind == "GPU" else real(kind))
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *args: noted.append(args))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda *args: noted.append(args))
    return noted


@pytest.mark.parametrize(("count", "names"), [(0, 1), (1, 1), (4, 4)])
def test_logical_cpus(count, names):
    tf.constant(1)  # initializes TensorFlow's devices
    assert devices.local_device_names(count) == [f"CPU:{i}" for i in range(names)]


def test_logical_cpus_are_made_when_tensorflow_starts():
    tf.constant(1)
    with pytest.raises(
        InputError, match="Received: devices=5, after TensorFlow has started with 4. Load the strategy before"
    ):
        devices.local_device_names(5)


def test_no_more_logical_cpus_than_start_in_a_minute():
    with pytest.raises(InputError, match="at most 32 logical CPU devices, .* Received: 33 devices. Use fewer, or"):
        devices.local_device_names(33)


def test_all_gpus_unless_told(gpus):
    assert devices.local_device_names(0) == ["GPU:0", "GPU:1"]
    assert devices.local_device_names(1) == ["GPU:0"]
    with pytest.raises(InputError, match="Received: 3, with 2 GPUs"):
        devices.local_device_names(3)


def test_one_gpu_for_each_process_of_a_host(gpus):
    devices.use_one_gpu(1)
    assert gpus == [(GPUS[1], "GPU"), (GPUS[1], True)]
    with pytest.raises(InputError, match="local rank 2, with 2 GPUs"):
        devices.use_one_gpu(2)


def test_without_gpus_there_is_nothing_to_choose():
    devices.use_one_gpu(3)


@pytest.mark.parametrize(
    ("local_size", "asked", "expected"), [(1, 0, []), (1, 3, [3]), (2, 0, [4]), (2, 3, [3]), (99, 0, [1])]
)
def test_processes_of_a_host_share_its_cores(monkeypatch, local_size, asked, expected):
    noted: list[int] = []
    monkeypatch.setattr(devices, "bind_to_share", lambda rank, size, assigned: max(1, 8 // size))
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", noted.append)
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 0)
    monkeypatch.setattr(devices, "add_inter_op_threads", lambda count: noted.append(-count))
    devices.share_cores(Cluster(size=local_size, local_size=local_size), asked)
    assert noted == [*expected, *([-1] if expected else [])]


def test_each_logical_cpu_has_a_thread_that_may_wait(monkeypatch):
    noted: list[int] = []
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda cpu: None)
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda cpu, devices: None)
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 2)
    monkeypatch.setattr(tf.config.threading, "set_inter_op_parallelism_threads", noted.append)
    devices.local_device_names(3)
    assert noted == [5]


def test_threads_are_fixed_once_tensorflow_runs():
    tf.constant(1)
    with pytest.raises(InputError, match="Load the strategy first"):
        devices.share_cores(Cluster(), 7)
