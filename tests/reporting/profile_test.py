import types

import pytest
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.reporting import NullProfile, ProfileWindow
from tfdist.reporting.profile import parse_steps


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of TensorFlow's profiler."""
    told: list[str] = []
    profiler = types.SimpleNamespace(start=lambda path: told.append(f"start {path}"), stop=lambda: told.append("stop"))
    monkeypatch.setattr(tf.profiler, "experimental", profiler)
    return told


def run(profile: NullProfile, *steps: int) -> None:
    for step in steps:
        profile.at(step)
    profile.close()


def test_it_profiles_from_a_to_b(calls):
    profile = ProfileWindow("10:20", "board")
    assert profile.boundaries == (10, 20)
    seen = {}
    for step in (0, 9, 10, 15, 20, 30):
        profile.at(step)
        seen[step] = list(calls)
    started, stopped = ["start board"], ["start board", "stop"]
    assert seen == {0: [], 9: [], 10: started, 15: started, 20: stopped, 30: stopped}
    profile.close()
    assert calls == stopped


def test_a_run_that_ends_in_between_stops_it(calls):
    run(ProfileWindow("10:20", "board"), 0, 10, 15)
    assert calls == ["start board", "stop"]


def test_a_run_that_begins_in_between_profiles_the_rest(calls):
    run(ProfileWindow("10:20", "board"), 15, 20)
    assert calls == ["start board", "stop"]


def test_a_run_that_begins_later_profiles_nothing(calls):
    run(ProfileWindow("10:20", "board"), 20, 30)
    assert calls == []


def test_a_run_without_a_profile_has_no_borders(calls):
    assert NullProfile().boundaries == ()
    run(NullProfile(), 0, 10)
    assert calls == []


@pytest.mark.parametrize("steps", ["", "5", ":", "5:", ":5", "5:5", "6:5", "-1:5", "1.5:3", "a:b", "1:2:3"])
def test_anything_else_is_bad_input(steps):
    with pytest.raises(InputError) as caught:
        parse_steps(steps)
    assert f"Received: {steps!r}." in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensorflow_writes_a_profile(tmp_path):
    profile = ProfileWindow("1:2", tmp_path)
    profile.at(1)
    tf.linalg.matmul(tf.ones([8, 8]), tf.ones([8, 8]))
    profile.at(2)
    (written,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert written.stat().st_size > 0
