"""The evaluator of a launched job: its environment, its end and its failure, which the job survives."""

import os
import signal

import pytest

from tests.launcher.launching import Launch, Launches, ends, python
from tests.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.waits]
FLAGS = ("--processes=2", "--evaluator", "--log_dir=logs")
PROGRAM = """
import pathlib, signal
restart = int(os.environ['TFDIST_RESTART'])
is_evaluator = json.loads(os.environ['TF_CONFIG'])['task']['type'] == 'evaluator'
def wait_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
    print('saw', name)
"""


def run(launch: Launches, evaluator: str, ranks: str, *flags: str) -> Launch:
    return launch(*python(f"{PROGRAM}if is_evaluator:\n    {evaluator}\nelse:\n    {ranks}"), flags=(*FLAGS, *flags))


def test_the_job_waits_for_its_last_evaluation(launch, tmp_path):
    here = "assert 'TFDIST_GROUP' not in os.environ; wait_for('go'); time.sleep(0.3); print('evaluated')"
    job = run(launch, here, "pathlib.Path('go').touch()")
    assert job.wait() == 0
    assert job.out.splitlines() == ["[evaluator] saw go", "[evaluator] evaluated"]
    assert job.said[0] == "tfdist launch: ranks 0, 1 of 2, an evaluator, logs in logs"
    assert (tmp_path / "logs/evaluator.log").read_text() == "saw go\nevaluated\n"


@pytest.mark.parametrize("how", ["sys.exit(2)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_training_goes_on_when_the_evaluator_fails(how, launch):
    job = run(launch, f"pathlib.Path('go').touch(); {how}", "wait_for('go'); print('trained')")
    assert job.wait() == 0
    assert job.out.count("trained") == 2
    code = "code 2 (bad input)" if "exit" in how else "code 137 (killed by SIGKILL)"
    assert job.said[2:] == [
        f"tfdist launch: the evaluator ended with {code}; training continues without it. Its log: logs/evaluator.log"
    ]


def test_the_evaluator_is_ended_with_a_failed_attempt_and_started_again_with_the_next(launch):
    here = "pathlib.Path('go').touch(); print('evaluates', restart, flush=True); restart or signal.pause()"
    job = run(
        launch, here, "wait_for('go'); sys.exit(not restart)", "--max_restarts=1", "--restart_backoff_seconds=0.1"
    )
    assert job.wait() == 0 and job.seconds < 60
    assert [line for line in job.out.splitlines() if "evaluates" in line] == [
        "[evaluator] evaluates 0",
        "[evaluator] evaluates 1",
    ]
    assert len(job.said) == 3 and "restart 1 of 1" in job.said[2]  # a death that the launcher causes is not reported


def test_a_request_to_end_during_the_last_evaluation_ends_it_and_training_has_succeeded(launch, tmp_path):
    job = run(launch, "wait_for('go')", "pathlib.Path(f'rank-{rank}').write_text(f'{os.getpid()} ')")
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    pids = [wait_for(lambda file=file: file.exists() and file.read_text()) for file in files]
    assert all(ends(int(pid)) for pid in pids)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() == 0
