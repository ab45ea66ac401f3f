import pathlib
import resource
import types

import psutil
import pytest
import tensorflow as tf

from tfdist.reporting import memory

MEGABYTE = 1 << 20


def test_the_peak_is_at_least_what_is_resident_now():
    assert memory.host_peak_bytes() >= psutil.Process().memory_info().rss // 2
    assert memory.host_peak_bytes() < psutil.virtual_memory().total


def test_the_peak_stays_after_the_memory_is_given_back():
    resident = psutil.Process().memory_info().rss
    held = b"x" * (128 * MEGABYTE)
    del held
    assert memory.host_peak_bytes() >= resident + 120 * MEGABYTE


@pytest.mark.parametrize(("platform", "factor"), [("linux", 1024), ("darwin", 1)])
def test_systems_without_proc_are_asked_another_way(monkeypatch, platform, factor):
    monkeypatch.setattr(memory, "_STATUS", pathlib.Path("/nowhere"))
    monkeypatch.setattr(memory.sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: types.SimpleNamespace(ru_maxrss=7))
    assert memory.host_peak_bytes() == 7 * factor


def test_without_a_device_there_is_no_field_for_it(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    assert set(memory.peak_memory()) == {"peak_memory_bytes"}


def test_the_fullest_device_counts(monkeypatch):
    peaks = {"GPU:0": 3 * MEGABYTE, "GPU:1": 5 * MEGABYTE}
    gpus = [types.SimpleNamespace(name=f"/device:{name}") for name in peaks]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus if kind == "GPU" else [])
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: {"current": 1, "peak": peaks[name]})
    assert memory.peak_memory()["device_peak_memory_bytes"] == 5 * MEGABYTE
