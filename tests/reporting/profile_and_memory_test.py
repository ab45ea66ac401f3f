"""Profiles of steps, and peaks of memory."""

import resource
import types

import psutil
import pytest
import tensorflow as tf

from tfdist.config.fields import parse_step_range
from tfdist.errors import InputError
from tfdist.reporting import environment
from tfdist.reporting.profile import NullProfile, ProfileWindow


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of TensorFlow's profiler."""
    told: list[str] = []
    profiler = types.SimpleNamespace(start=lambda path: told.append(f"start {path}"), stop=lambda: told.append("stop"))
    monkeypatch.setattr(tf.profiler, "experimental", profiler)
    return told


def run(profile: NullProfile, *steps: int) -> None:
    for step in steps:
        profile.on_step(step)
    profile.close()


def test_it_profiles_from_a_to_b(calls):
    profile = ProfileWindow("10:20", "board")
    assert profile.boundaries == (10, 20)
    seen = {}
    for step in (0, 9, 10, 15, 20, 30):
        profile.on_step(step)
        seen[step] = list(calls)
    started, stopped = ["start board"], ["start board", "stop"]
    assert seen == {0: [], 9: [], 10: started, 15: started, 20: stopped, 30: stopped}
    profile.close()
    assert calls == stopped


@pytest.mark.parametrize(
    ("steps", "found"),
    [((0, 10, 15), ["start board", "stop"]), ((15, 20), ["start board", "stop"]), ((20, 30), [])],
    ids=["ends in between", "begins in between", "begins later"],
)
def test_a_run_that_ends_or_begins_elsewhere(calls, steps, found):
    """The end stops it, and the rest is profiled."""
    run(ProfileWindow("10:20", "board"), *steps)
    assert calls == found


@pytest.mark.parametrize("steps", ["", "5", ":", "5:", ":5", "5:5", "6:5", "-1:5", "1.5:3", "a:b", "1:2:3"])
def test_anything_else_is_bad_input(steps):
    with pytest.raises(InputError, match=f"^{steps} must be A:B, two step numbers with 0 <= A < B. Write 10:20$"):
        parse_step_range(steps)


def test_tensorflow_writes_a_profile(tmp_path):
    profile = ProfileWindow("1:2", tmp_path)
    profile.on_step(1)
    tf.linalg.matmul(tf.ones([8, 8]), tf.ones([8, 8]))
    profile.on_step(2)
    (written,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert written.stat().st_size > 0


MEGABYTE = 1 << 20


def test_the_peak_stays_after_the_memory_is_given_back():
    resident = psutil.Process().memory_info().rss
    held = b"x" * (128 * MEGABYTE)
    del held
    assert environment.host_peak_bytes() >= resident + 120 * MEGABYTE


def test_kernels_that_do_not_say_it_are_asked_another_way(monkeypatch, tmp_path):
    (tmp_path / "status").write_text("Name: python\n")
    monkeypatch.setattr(environment, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(resource, "getrusage", lambda who: types.SimpleNamespace(ru_maxrss=7))
    assert environment.host_peak_bytes() == 7 * 1024


def test_without_a_device_there_is_no_field_for_it(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    assert set(environment.peak_memory()) == {"peak_memory_bytes"}


def test_the_fullest_device_counts(monkeypatch):
    peaks = {"GPU:0": 3 * MEGABYTE, "GPU:1": 5 * MEGABYTE}
    gpus = [types.SimpleNamespace(name=f"/device:{name}") for name in peaks]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus if kind == "GPU" else [])
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: {"current": 1, "peak": peaks[name]})
    assert environment.peak_memory()["device_peak_memory_bytes"] == 5 * MEGABYTE
