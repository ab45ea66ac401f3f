"""Exchanges during the steps on real ranks: the order in which ranks send does not matter, and a lost rank ends the run."""

import json
import pathlib
import signal
import sys

import pytest

from tests import processes
from tests.selection import quick

pytestmark = pytest.mark.processes

WORKER = pathlib.Path(__file__).with_name("streaming_worker.py")
SYNCS = ("diloco(period=6, fragments=2, overlap=True, delay=2)", "diloco(period=6, fragments=2, delay=2)")
LONG = ("--dataset=digits", "--model=mlp", "--steps=1000000", "--epochs=0", "--batch_size=32")


@pytest.mark.parametrize("strategy", quick(["multiworker", "horovod"], "multiworker"))
def test_overlap_changes_no_bit(strategy: str) -> None:
    """Each rank prints the same, with an exchange during the steps and with one between them."""
    with processes.job([sys.executable, str(WORKER), strategy, *SYNCS], 3) as job:
        ended = job.wait(300)
    assert [end.code for end in ended] == [0, 0, 0], "\n".join(end.output for end in ended)
    found = [
        {**json.loads(line), "sync": ""} for end in ended for line in end.output.splitlines() if line.startswith('{"')
    ]
    assert len(found) == 6
    assert all(each == found[0] for each in found)
    assert any(divergence for _, divergence in found[0]["losses"])


@pytest.mark.parametrize("strategy", quick(["multiworker", "horovod"], "horovod"))
def test_a_lost_rank_ends_the_run(strategy: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without an exchange during the steps: the others end with code 5, and soon."""
    monkeypatch.chdir(tmp_path)
    flags = (f"--strategy={strategy}", "--sync=diloco(period=4, fragments=2, overlap=True)", "--output_dir=run")
    with processes.job([sys.executable, "-m", "tfdist.train", *LONG, *flags], 3) as job:
        job.wait_for(0, "step 20/", 120)
        job.processes[1].send_signal(signal.SIGKILL)
        ended = job.wait(300)
    assert [ended[rank].code for rank in (0, 2)] == [5, 5], ended[0].output
