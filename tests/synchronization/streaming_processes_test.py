"""Exchanges during the steps on real ranks: the order in which ranks send does not matter, and a lost rank ends the run."""

import pathlib
import signal
import sys

import pytest

from tests import processes
from tests.selection import quick
from tests.workers import running

pytestmark = pytest.mark.processes

SYNCS = ("diloco(period=6, fragments=2, overlap=True, delay=2)", "diloco(period=6, fragments=2, delay=2)")
LONG = ("--dataset=digits", "--model=mlp", "--steps=1000000", "--epochs=0", "--batch_size=32")


@pytest.mark.parametrize("strategy", quick(["multiworker", "horovod"], "multiworker"))
def test_overlap_changes_no_bit(strategy: str, tmp_path: pathlib.Path) -> None:
    """Each rank has the same, with an exchange during the steps and with one between them."""
    found = sum(running.outcomes("streaming", strategy, 3, tmp_path, *SYNCS, seconds=300), [])
    assert len(found) == 6
    assert all(each == found[0] for each in found)
    assert any(divergence for _, divergence in found[0]["losses"])


@pytest.mark.parametrize("strategy", quick(["multiworker", "horovod"], "horovod"))
@pytest.mark.smoke("horovod")
def test_a_lost_rank_ends_the_run(strategy: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without an exchange during the steps: the others end with code 5, and soon."""
    monkeypatch.chdir(tmp_path)
    flags = (f"--strategy={strategy}", "--sync=diloco(period=4, fragments=2, overlap=True)", "--output_dir=run")
    with processes.job([sys.executable, "-m", "tfdist.train", *LONG, *flags], 3) as job:
        job.wait_for(0, "step 20/", 120)
        job.processes[1].send_signal(signal.SIGKILL)
        ended = job.wait(300)
    assert [ended[rank].code for rank in (0, 2)] == [5, 5], ended[0].output
