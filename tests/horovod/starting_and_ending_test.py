"""A late rank is waited for at the start; a rank that fails ends the job with its exit code, and no other waits for it."""

import pathlib
import sys
import time

import pytest

pytest.importorskip("horovod")

from tests import jobs as processes
from tests.horovod.jobs import WITHOUT_HOROVOD, launched
from tfdist.distribution import horovod_rendezvous as rendezvous

LATE = """
import os, time
if os.environ["HOROVOD_RANK"] == "1":
    time.sleep(6)
import tfdist.horovod as hvd
hvd.init()
print("rank", hvd.rank(), "of", hvd.size())
"""
PROGRAM = """
import sys
import tensorflow as tf
import tfdist.horovod as hvd

def main():
    hvd.init()
    step = tf.function(lambda: hvd.allreduce(tf.ones([2])))
    step()
    if hvd.rank() == 1:
        {end}
    {others}

if __name__ == "__main__":
    sys.exit(main())
"""
WAIT = "step()"  # in the engine, as what a function calls is compared only when it is traced
ENVIRONMENT = {"TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
# Without Horovod, ranks wait for a rank in a collective of a compiled function until the stall limit.
STALL = ENVIRONMENT | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}
PATIENCE = 100.0  # seconds


@pytest.mark.processes
def test_a_rank_that_comes_late_is_waited_for():
    """Horovod's Gloo would abort after its own timeout."""
    with processes.job(launched(["-c", LATE]), 1, ENVIRONMENT | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "2"}) as job:
        [end] = job.wait(300)
    assert end.code == 0, end.output
    assert "rank 0 of 2" in end.output and "rank 1 of 2" in end.output, end.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("launcher", "end", "others", "code", "reason"),
    [
        ("tensorflow", "return 'a message'", WAIT, 1, "1 ended with code 1 (failed). "),
        pytest.param(
            "tensorflow", "raise ValueError('wrong')", "return", 1, "ValueError: wrong. ", marks=pytest.mark.full
        ),
        pytest.param(
            "tensorflow",
            "return 7",
            "hvd.allreduce(tf.ones([2]))",
            2,
            'rank 1 has "none, because the program has ended"',
            marks=pytest.mark.full,
        ),
        pytest.param("horovod", "return 7", WAIT, 7, "1 ended with code 7. ", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_fails_ends_the_job(launcher, end, others, code, reason, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(end=end, others=others))
    command = [str(script)] if launcher == "horovod" else [WITHOUT_HOROVOD, str(script)]
    began = time.monotonic()
    with processes.job(launched(command, launcher=launcher), 1, STALL) as job:
        [ended] = job.wait(300)
    assert ended.code == code, ended.output
    assert time.monotonic() - began < PATIENCE
    last = ended.output.splitlines()[-1]
    assert last.startswith("tfdist launch: rank ") and reason in last


@pytest.mark.processes
@pytest.mark.full  # TensorFlow needs half a minute to notice the lost rank
def test_a_rank_that_fails_without_a_launcher_does_not_wait(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(end="return 7", others=WAIT))
    began = time.monotonic()
    with processes.job([sys.executable, WITHOUT_HOROVOD, str(script)], 2, STALL) as job:
        ends = job.wait(300)
    assert ends[1].code == 7, ends[1].output
    assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize(
    ("check", "shutdown", "expected"),
    [
        ("", "", (60, 3600)),
        ("5", "", (5, 3600)),
        ("1900", "", (1900, 3800)),
        ("", "4", (2, 4)),
        ("", "0", (60, 0)),
        ("9", "8", (9, 8)),
    ],
)
def test_the_users_settings_of_warnings_and_ends_stand_and_ours_keep_to_them(check, shutdown, expected):
    """0 means never; the user may set a shutdown before the check, for which Horovod logs a warning."""
    given = {rendezvous.STALL_CHECK: check, rendezvous.STALL_SHUTDOWN: shutdown}
    found = rendezvous.stall_settings({name: value for name, value in given.items() if value}, 3600)
    assert (int(found[rendezvous.STALL_CHECK]), int(found[rendezvous.STALL_SHUTDOWN])) == expected
