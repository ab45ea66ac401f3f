import json
import os
import signal
import sys
import time

import psutil
import pytest

from tfdist.errors import InputError, PeerLostError, SpawnError
from tfdist.launcher.spawn import spawn

pytestmark = pytest.mark.processes

# Processes that should be ended earlier only sleep for 60 s, so that a failing test does not hang.
pytest.importorskip("cloudpickle")  # the new processes cannot import this file's functions


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def by_value(function):
    """Makes a function be pickled by value, like a notebook's."""
    function.__module__ = "__main__"
    return function


@by_value
def rank():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def test_each_ranks_value_comes_back_in_order():
    place = by_value(lambda a, b: (rank(), a, b, "tensorflow" in sys.modules))
    assert spawn(place, processes=3, args=(1,), kwargs={"b": [2]}) == [(r, 1, [2], False) for r in range(3)]


def test_a_function_of_a_module_travels_by_name():
    assert spawn(os.getenv, args=("TFDIST_GROUP",))[0].startswith("127.0.0.1:")


def test_the_processes_find_each_other():
    @by_value
    def gather():
        from tfdist.cluster.environment import from_tf_config
        from tfdist.coordination import join

        cluster = from_tf_config(os.environ)
        assert cluster
        group = join(cluster)
        all_launchers = group.gather("x", cluster.rank * 10)
        group.leave()
        return all_launchers

    assert spawn(gather) == [[0, 10], [0, 10]]


def test_the_first_real_failure_is_raised_here_with_its_rank_and_traceback():
    @by_value
    def fail():
        if rank() == 1:
            raise KeyError("missing")
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(KeyError, match="missing") as raised:
        spawn(fail, processes=3)
    assert time.monotonic() - began < 40.0
    (note,) = raised.value.__notes__
    assert note.startswith("This was raised in the process of rank 1:\nTraceback")
    assert "in fail" in note  # without the file: cloudpickle 3.1.3 pickles functions without file names


def test_who_lost_a_peer_did_not_fail_first(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.launcher.supervision.SETTLE_SECONDS", 60.0)

    @by_value
    def fail(up):
        if rank() == 0:
            while not os.path.exists(up):
                time.sleep(0.01)
            raise PeerLostError("rank 1 is lost")
        open(up, "w").close()
        time.sleep(0.2)
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        spawn(fail, args=(str(tmp_path / "up"),))


def test_a_process_that_is_killed_is_named():
    @by_value
    def die():
        if rank() == 1:
            os.kill(os.getpid(), 9)
        time.sleep(60)

    with pytest.raises(SpawnError, match=r"rank 1 ended with code 137 \(killed by SIGKILL\)") as raised:
        spawn(die)
    assert (raised.value.rank, raised.value.code) == (1, 137)


def test_a_function_that_ends_its_process_has_no_value():
    with pytest.raises(SpawnError, match=r"rank 0 ended with code 0 \(done\) before its function returned"):
        spawn(sys.exit, args=(0,))


def test_time_may_run_out():
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the processes did not end within 0.5 s"):
        spawn(time.sleep, args=(60,), timeout=0.5)
    assert time.monotonic() - began < 40.0


def test_output_appears_behind_the_rank(capfd, tmp_path):
    spawn(print, args=("hello",), log_dir=str(tmp_path))
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] hello", "[1] hello"]
    assert (tmp_path / "rank-1.log").read_text() == "hello\n"


def test_bad_input_is_told_before_anything_starts():
    with pytest.raises(InputError, match="--processes must be at least 1"):
        spawn(print, processes=0)


def test_an_interrupted_notebook_leaves_nobody(monkeypatch, tmp_path):
    """Ctrl-C while `spawn` waits: the processes are asked to end, and the interrupt is raised when they have."""

    @by_value
    def wait():
        def save(*_):
            (tmp_path / f"saved-{rank()}").touch()
            sys.exit(1)

        signal.signal(signal.SIGTERM, save)
        (tmp_path / f"ready-{rank()}").touch()
        time.sleep(60)

    from tfdist.launcher import supervision

    interrupts = iter([KeyboardInterrupt])

    def interrupt(self):
        if len(list(tmp_path.glob("ready-*"))) == 2:
            for error in interrupts:
                raise error
        return original(self)

    original = supervision.Supervisor._forward_output
    monkeypatch.setattr(supervision.Supervisor, "_forward_output", interrupt)
    with pytest.raises(KeyboardInterrupt):
        spawn(wait)
    assert len(list(tmp_path.glob("saved-*"))) == 2
