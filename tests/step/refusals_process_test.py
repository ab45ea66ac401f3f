"""What is compared or refused on one process is so on all: a program that catches the error can go on in each of them."""

import pathlib
import sys

import keras
import pytest

import tfdist
from tests import processes
from tests.selection import quick
from tests.workers import row_dependence, running

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("strategy", quick(["multiworker", "horovod"], "multiworker"))
@pytest.mark.smoke
def test_a_loss_of_all_rows_is_partitioned_and_refused_with_local_training(
    strategy: str, single: tfdist.Strategy, tmp_path: pathlib.Path
) -> None:
    alone = [row_dependence.fit(single, penalty) for penalty in (keras.ops.mean, row_dependence.largest)]
    for of_mean, refusal, of_all_rows in running.outcomes("row_dependence", strategy, 2, tmp_path, seconds=200):
        for history, expected in zip((of_mean, of_all_rows), alone, strict=True):
            assert history == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}
        assert "a loss must be a mean over rows" in refusal and "the loss added by measured" in refusal


@pytest.mark.parametrize(
    ("launcher", "schedule"),
    [
        ("tensorflow", "1f1b"),
        pytest.param("tensorflow", "pipedream", marks=pytest.mark.full),
        pytest.param("horovod", "1f1b", marks=pytest.mark.full),
    ],
)
def test_no_process_waits_for_a_stage_that_refuses(launcher: str, schedule: str, tmp_path: pathlib.Path) -> None:
    worker = running.command("refusals", "pipeline(micro_batches=2, cut='first')", tmp_path, schedule)
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", f"--launcher={launcher}"]
    with processes.job([*launch, f"--log_dir={tmp_path}", "--", *worker], 1) as job:
        [end] = job.wait(300)
    assert end.code == 0, end.output
    first, last = running.read(tmp_path, 2)
    refused = "InputError: Every process must accept its part of the model. Received on rank 1 (stage 1): "
    assert len(first["rows"]) == 4  # of fit, twice, evaluate and predict
    for one, other in zip(first["rows"], last["rows"], strict=True):
        assert one.startswith(refused) and "rows are refused" in one
        assert "ValueError: " in other and "rows are refused" in other
    [one], [other] = first["stateful"], last["stateful"]
    assert one.startswith(refused) and "Model, loss and metrics must fit the data" in other
    own = "InputError: The state cannot be divided. Received: 1 variable. Use another one."
    assert first["state"] == last["state"] == [own]
