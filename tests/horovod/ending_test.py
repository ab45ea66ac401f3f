"""A rank that fails ends the job with its exit code; the others wait for it neither in a call nor at their end."""

import pathlib
import sys
import time

import pytest

pytest.importorskip("horovod")

from tfdist.testing import processes

pytestmark = pytest.mark.processes

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
WITHOUT_HOROVOD = str(pathlib.Path(__file__).with_name("without_horovod.py"))
PATIENCE = 100.0  # seconds; ranks would wait for ten minutes


@pytest.mark.parametrize(
    ("launcher", "end", "others", "code", "reason"),
    [
        ("tensorflow", "return 'a message'", WAIT, 1, "code 1 (failed). "),
        pytest.param(
            "tensorflow", "raise ValueError('wrong')", "return", 1, "ValueError: wrong. ", marks=pytest.mark.full
        ),
        pytest.param("horovod", "return 7", WAIT, 7, "code 7. ", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_fails_ends_the_job(launcher, end, others, code, reason, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(end=end, others=others))
    command = [str(script)] if launcher == "horovod" else [WITHOUT_HOROVOD, str(script)]
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", f"--launcher={launcher}", "--", sys.executable]
    began = time.monotonic()
    with processes.job([*launch, *command], 1, ENVIRONMENT) as job:
        [ended] = job.wait(300)
    assert ended.code == code, ended.output
    assert time.monotonic() - began < PATIENCE
    last = ended.output.splitlines()[-1]
    assert last.startswith("tfdist.launch: rank 1 ended with code") and reason in last


@pytest.mark.full  # TensorFlow needs half a minute to notice the lost rank
def test_a_rank_that_fails_without_a_launcher_does_not_wait(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(end="return 7", others=WAIT))
    began = time.monotonic()
    with processes.job([sys.executable, WITHOUT_HOROVOD, str(script)], 2, ENVIRONMENT) as job:
        ends = job.wait(300)
    assert ends[1].code == 7, ends[1].output
    assert time.monotonic() - began < PATIENCE
