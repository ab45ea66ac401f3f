"""The proof from a run's ledger: correct runs are proved, and every kind of error is named."""

import json
import re

import numpy as np
import pytest

from tests import documented_json
from tests.reporting.run_directory_test import create
from tfdist import ledger
from tfdist.errors import InputError
from tfdist.reporting import RunDirectory
from tfdist.reporting.ledger_file import LedgerFile, read_ledger

SIZE, BATCH = 10, 4
OPEN: list[LedgerFile] = []
STREAM = np.concatenate([np.random.default_rng(epoch).permutation(SIZE) for epoch in range(4)])


def start(directory: RunDirectory, step: int, ranks: int, **others: int) -> list[LedgerFile]:
    facts = {"batch_size": BATCH, "examples": SIZE, "examples_before": step * BATCH, "ledgers": ranks, **others}
    number = directory.begin("--steps=5\n", ["alpha"], step=step, facts=facts)
    files = [LedgerFile(directory.ledger(number, rank)) for rank in range(ranks)]
    OPEN.extend(files)
    return files


def use(files: list[LedgerFile], steps: range, stream: np.ndarray = STREAM) -> None:
    """Records one call of the loop, with its rows distributed evenly."""
    rows = stream[steps.start * BATCH : steps.stop * BATCH].reshape(len(steps), len(files), -1)
    for rank, file in enumerate(files):
        file.write(steps.start, len(steps), rows[:, rank].ravel())


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.make()
    yield directory
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def said(directory, capsys):
    """Returns a function that returns what the command says, which ends with a code."""

    def run(code: int) -> str:
        assert ledger.main(str(directory.path)) == code
        return capsys.readouterr().out

    return run


@pytest.mark.smoke("ledger")
def test_one_start(directory, said):
    files = start(directory, 0, 2)
    use(files, range(0, 3))
    use(files, range(3, 6))
    assert said(0) == (
        "Proved: 6 steps, 1 attempt. Each of 10 examples was used exactly once in each of 2 epochs; "
        "4 in the next one, none twice.\n"
    )


@pytest.mark.parametrize(("stream", "code"), [(STREAM, 0), (STREAM % 9, 1)])
def test_json_says_what_the_text_says(stream, code, directory, said, capsys):
    use(start(directory, 0, 2), range(0, 6), stream)
    record = documented_json.printed("ledger", ledger.main, str(directory.path), code=code)
    assert not capsys.readouterr().out
    *problems, last = said(code).splitlines()
    assert record["problems"] == problems and record["proved"] == (not code)
    counts = [record[k] for k in ("steps", "starts", "examples_per_epoch", "complete_epochs", "examples_of_next_epoch")]
    shown = [int(number) for number in re.findall(r"\d+", last)]
    assert shown == ([record["problem_count"], len(problems)] if code else counts)


def test_restarts_and_resizes(directory, said):
    """Repeated steps count once: as made by the start that led to the result."""
    use(start(directory, 0, 2), range(0, 4))
    use(start(directory, 2, 1), range(2, 6), STREAM)
    use(start(directory, 1, 4), range(1, 3))
    files = start(directory, 3, 1)
    use(files, range(3, 5))
    assert said(0).startswith("Proved: 5 steps, 3 attempts.")


AGAIN = "examples were used more than once"
EPOCHS = "Each of 10 examples was used exactly once in each of"
# The starts of a run with one process, each with its step, other facts and calls, and the beginning of what is said.
RUNS = {
    "batches change, and each new start repeats a step of the one before": (
        [
            (0, {}, (0, 3, STREAM[:12])),
            (2, {"batch_size": 2, "examples_before": 8}, (2, 4, STREAM[8:16])),
            (5, {"examples_before": 14}, (5, 2, STREAM[14:22])),
        ],
        f"Proved: 7 steps, 3 attempts. {EPOCHS} 2 epochs; 2 in",
    ),
    "examples are left out, as if the position were the step times the batch size": (
        [(0, {}, (0, 2, STREAM[:8])), (2, {"batch_size": 2, "examples_before": 8}, (2, 8, STREAM[4:20]))],
        f"epoch 0: 2 {AGAIN}",
    ),
    "the run began with the checkpoint of another batch": (
        [(3, {"examples_before": 6}, (3, 4, STREAM[6:22]))],
        f"Proved: 4 steps, 1 attempt. {EPOCHS} 1 epochs; 2 in",
    ),
    "the run began with the checkpoint of another": (
        [(3, {}, (3, 5, STREAM[12:32]))],
        f"Proved: 5 steps, 1 attempt. {EPOCHS} 1 epochs; 2 in",
    ),
    "batches have several epochs each": (
        [(0, {"batch_size": 25}, (0, 1, STREAM[:25]), (1, 1, np.concatenate([STREAM[25:], STREAM[:10]])))],
        f"Proved: 2 steps, 1 attempt. {EPOCHS} 5 epochs; 0 in",
    ),
    "the dataset became another, whose examples would otherwise count as part of an epoch": (
        [(0, {}, (0, 5, STREAM[:20])), (5, {"examples": 8}, (5, 2, np.arange(8)))],
        "attempt 1: an epoch has 8 examples, but the run began with 10\n",
    ),
    "nobody recorded some steps": (
        [(0, {}, (0, 2, STREAM[:8])), (4, {}, (4, 1, STREAM[16:20]))],
        "step 2: process 0 of attempt 0 did not record it",
    ),
    "a batch is too small": ([(0, {}, (0, 2, STREAM[:6]))], "step 0: 3 examples, but a batch has 4"),
    "a start that does not count says nothing of where the run began": (
        [(5, {}, (5, 1, STREAM[20:24])), (0, {}, (0, 5, np.zeros(20, int)))],
        f"epoch 0: 1 {AGAIN}",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_with_one_process(name, directory, said):
    starts, text = RUNS[name]
    for step, others, *calls in starts:
        [file] = start(directory, step, 1, **others)
        for call in calls:
            file.write(*call)
    assert said(0 if text.startswith("Proved") else 1).startswith(text)


def test_a_call_that_a_crash_cut_off(directory, said):
    files = start(directory, 0, 1)
    use(files, range(0, 5))
    path = directory.ledger(0, 0)
    path.write_bytes(path.read_bytes()[:-8])
    assert list(read_ledger(path)) == []
    use(start(directory, 0, 1), range(0, 5))
    said(0)


@pytest.mark.parametrize(
    ("stream", "steps", "problem"),
    [
        (np.where(STREAM == 3, 7, STREAM), 5, "epoch 0: 1 examples were used more than once, the first is 7"),
        (np.where(STREAM == 3, 10, STREAM), 5, "epoch 0: example 10 is not among 10"),
        (np.concatenate([STREAM[1:], [0]]), 5, "epoch 0"),
        (STREAM * 0, 2, "epoch 0, which has not ended: 1 examples were used more than once, the first is 0"),
    ],
)
def test_other_examples(directory, said, stream, steps, problem):
    use(start(directory, 0, 1), range(0, steps), stream)
    first, *_, last = said(1).splitlines()
    assert first.startswith(problem) and last.startswith("Not proved")


def test_a_long_epoch_is_put_together_once(directory, said, monkeypatch):
    """Concatenating at each step would copy the epoch each time."""
    size, copied = 4000, []
    [file] = start(directory, 0, 1, examples=size)
    file.write(0, size // BATCH, np.arange(size))
    concatenate = np.concatenate
    monkeypatch.setattr(np, "concatenate", lambda arrays: copied.append(sum(map(len, arrays))) or concatenate(arrays))
    said(0)
    assert sum(copied) <= 3 * size


def test_a_step_that_a_process_did_not_record(directory, said):
    files = start(directory, 0, 2)
    use(files, range(0, 2))
    files[0].write(2, 1, STREAM[8:10])
    assert "step 2: process 1 of attempt 0 did not record it" in said(1)


def test_what_is_no_run(tmp_path):
    create(tmp_path / "run")
    with pytest.raises(InputError, match="A ledger needs --checkpoint_every or --commit_every"):
        ledger.main(str(tmp_path / "run"))
    RunDirectory(tmp_path / "run").starts.write_text("")
    with pytest.raises(InputError, match="which contains no run"):
        ledger.main(str(tmp_path / "run"))


def test_starts_without_a_ledger_are_named(directory, said):
    """Only starts whose steps are part of the result; one whose steps were all repeated is ignored."""
    start(directory, 0, 0)
    use(start(directory, 0, 2), range(0, 3))
    assert said(0).startswith("Proved: 3 steps, 1 attempt.")
    start(directory, 2, 0)
    use(start(directory, 4, 1), range(4, 5))
    with pytest.raises(InputError) as raised:
        ledger.main(str(directory.path))
    assert f"{directory.path}, without either in attempt 2 (from step 2), counted from 0." in str(raised.value)


def test_what_is_no_ledger(directory):
    start(directory, 0, 1)
    directory.ledger(0, 0).write_bytes(np.array([0, 3, 4, 1, 2, 3, 4], "<i8").tobytes())
    with pytest.raises(InputError, match="with other data at entry 0"):
        ledger.main(str(directory.path))


def test_starts_say_from_where(directory):
    start(directory, 0, 1)
    directory.begin("--steps=9\n", ["alpha", "beta"], step=3, checkpoint="step-3", facts={"replicas": 2})
    first, second = [json.loads(line) for line in directory.starts.read_text().splitlines()]
    assert (first["step"], first["checkpoint"], first["flags"]) == (0, "", ["--steps=5"])
    assert (second["step"], second["checkpoint"], second["replicas"], second["hosts"]) == (
        3,
        "step-3",
        2,
        ["alpha", "beta"],
    )
    assert directory.flags.read_text() == "--steps=9\n"


def test_a_start_whose_records_are_gone(directory, said):
    use(start(directory, 0, 1), range(0, 3))
    use(start(directory, 3, 1), range(3, 5))
    directory.metrics.write_text(json.dumps({"kind": "train", "step": 5}) + "\n")
    said(0)
    directory.ledger(1, 0).unlink()
    assert "step 3: process 0 of attempt 1 did not record it" in said(1)


def test_records_behind_the_step_are_dropped_and_kept_elsewhere(directory):
    directory.begin("", ["alpha"])
    lines = [
        json.dumps({"kind": kind, "step": step}) + "\n" for kind, step in (("train", 1), ("train", 2), ("eval", 2))
    ]
    directory.metrics.write_text("".join(lines) + '{"kind": "tr')
    directory.begin("", ["alpha"], step=2, is_evaluated=False)
    assert directory.metrics.read_text() == "".join(lines[:2])
    assert [record["step"] for record in directory.records()] == [1, 2]
    assert directory.dropped.read_text() == lines[2]
    directory.begin("", ["alpha"])
    assert directory.dropped.read_text() == "".join([lines[2], *lines[:2]])
