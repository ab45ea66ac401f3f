"""Prove from the records of a run that it used each example of each epoch exactly once, across restarts and resizes."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tfdist.checkpoint.format import newest, step_of
from tfdist.cli import command
from tfdist.cli.output import TEXT, Output
from tfdist.errors import ExitCode, InputError
from tfdist.errors.formatting import count_of
from tfdist.reporting import RunDirectory
from tfdist.reporting.ledger_file import read_ledger
from tfdist.storage import StoragePath, path_of, storage_of

_MAX_LISTED = 10
_MAX_COUNT = 1 << 62


class Start(NamedTuple):
    """One start of the run, and those of its steps that count for the result.

    Attributes:
      number: number of the start, from 0.
      first: its first step.
      end: step after its last one that counts, as later ones were repeated; None if unknown, for the last start.
      before: number of examples used before its first step. For the first start that counts, this is where the proof
        begins; after that, the examples themselves are counted.
      batch_size: number of examples per step.
      examples: number of examples per epoch; the same for each start.
      files: ledgers of the processes, by rank.
    """

    number: int
    first: int
    end: int | None
    before: int
    batch_size: int
    examples: int
    files: list[StoragePath]


class Proof(NamedTuple):
    """The result of counting the examples of a run.

    Attributes:
      steps: number of steps that count for the result.
      starts: number of starts that count.
      examples: number of examples per epoch.
      epochs: number of complete epochs.
      next_examples: number of examples that were used in the epoch that has not ended.
      problems: contradictions.
    """

    steps: int
    starts: int
    examples: int
    epochs: int
    next_examples: int
    problems: list[str]


def main(run: str, output: Output = TEXT) -> int:
    """Prints the result; returns the exit code."""
    proof = prove(RunDirectory(path_of(run)))
    listed = proof.problems[:_MAX_LISTED]
    for problem in listed:
        output.line(problem)
    if proof.problems:
        output.line(f"Not proved: {len(proof.problems)} problems, of which {len(listed)} are above.")
    else:
        output.line(
            f"Proved: {proof.steps} steps, {count_of(proof.starts, 'start')}. Each of "
            f"{proof.examples} examples was used exactly once in each of {proof.epochs} epochs; {proof.next_examples} "
            "in the next one, none twice."
        )
    output.result(
        {
            "run": run,
            "proved": not proof.problems,
            "steps": proof.steps,
            "starts": proof.starts,
            "examples_per_epoch": proof.examples,
            "complete_epochs": proof.epochs,
            "examples_of_next_epoch": proof.next_examples,
            "problem_count": len(proof.problems),
            "problems": listed,
        }
    )
    return ExitCode.FAILED if proof.problems else ExitCode.DONE


def prove(directory: RunDirectory) -> Proof:
    """Counts the examples of a run.

    Raises:
      InputError: it is not the directory of a run, or its starts have no ledger.
    """
    starts = _starts(directory)
    size = starts[0].examples
    epoch, before = divmod(starts[0].before, size)  # a run that began with another one's checkpoint
    steps, epochs = 0, 0
    problems = _size_errors(starts)
    used: list[np.ndarray] = []  # of the current epoch, concatenated at its end
    count = 0
    for errors, numbers in _stream(starts, _completed_steps(directory)):
        problems += errors
        steps += 1
        used.append(numbers)
        count += len(numbers)
        while count >= size - before:
            rest = np.concatenate(used)
            problems += _problems(f"epoch {epoch}", rest[: size - before], size, is_complete=not before)
            used = [rest[size - before :]]
            epoch, count, epochs, before = epoch + 1, len(used[0]), epochs + (not before), 0
    rest = np.concatenate([np.zeros([0], np.int64), *used])
    problems += _problems(f"epoch {epoch}, which has not ended", rest, size, is_complete=False)
    return Proof(steps, len(starts), size, epochs, len(rest), problems)


def _starts(directory: RunDirectory) -> list[Start]:
    records = directory.read_starts()
    if not records:
        raise InputError(
            f"A ledger is kept in a run's directory. Received: {directory.path}, where no start is recorded. Give the "
            "directory of a run."
        )
    if any(start.get("trains_clients") for start in records):
        raise InputError(
            "A ledger proves that each epoch uses each example once, and clients are drawn at random. Received: "
            f"{directory.path}, a run with --sync=fedavg. Its ledger files say which examples each of its steps used."
        )
    ends = [start["step"] for start in records[1:]] + [None]
    ends_by_number = [_earliest(ends[number:]) for number in range(len(records))]
    counted = [  # all steps of other starts were repeated
        number for number, end in enumerate(ends_by_number) if end is None or end > records[number]["step"]
    ]
    _check_has_ledgers(records, counted, directory)
    for number in counted:
        _check_counts(number, records[number], directory)
    return [
        Start(
            number,
            records[number]["step"],
            ends_by_number[number],
            records[number]["examples_before"],
            records[number]["batch_size"],
            records[number]["examples"],
            [directory.ledger(number, rank) for rank in range(records[number]["ledgers"])],
        )
        for number in counted
    ]


def _check_counts(number: int, start: dict[str, Any], directory: RunDirectory) -> None:
    """Raises `InputError` unless the fields of a start that are needed here are counts, as a run writes them."""
    ranges = {
        "step": (0, _MAX_COUNT),
        "batch_size": (1, _MAX_COUNT),
        "examples": (1, _MAX_COUNT),
        "examples_before": (0, _MAX_COUNT),
        "ledgers": (0, 1 << 20),
    }
    for name, (smallest, most) in ranges.items():
        value = start.get(name)
        if type(value) is not int or not smallest <= value < most:
            raise InputError(
                f"A start of a run must have a count as its {name}. Received: {str(value):.80}, at start {number} in "
                f"{directory.starts}, counted from 0. Restore the file."
            )


def _check_has_ledgers(records: list[dict[str, Any]], counted: list[int], directory: RunDirectory) -> None:
    missing = [
        f"{number} (from step {records[number]['step']})" for number in counted if not records[number].get("ledgers")
    ]
    if missing:
        which = f"where neither was given at start {', '.join(missing)}, counted from 0"
        raise InputError(
            f"A ledger needs --checkpoint_every or --commit_every at each start of a run. Received: {directory.path}, "
            f"{which}. Such a start cannot be proved: give one of these flags to each start of the next run."
        )


def _size_errors(starts: list[Start]) -> list[str]:
    """Returns errors if the size of the data set has changed, so that epochs are undefined."""
    return [
        f"start {start.number}: an epoch has {start.examples} examples, where the run began with {starts[0].examples}"
        for start in starts
        if start.examples != starts[0].examples
    ]


def _completed_steps(directory: RunDirectory) -> int:
    """Returns the number of steps of the run according to its other files."""
    saved = [step_of(path) for path in newest(directory.checkpoints)]
    return max([0, *saved, *(record["step"] for record in directory.records())])


def _earliest(later: list[int | None]) -> int | None:
    known = [step for step in later if step is not None]
    return min(known) if known else None


def _stream(starts: list[Start], done: int) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yields, for each step that counts, its errors and the examples in the order of use."""
    expected = starts[0].first
    for start in starts:
        if start.first > expected:
            yield [f"steps {expected} to {start.first - 1}: not recorded"], np.zeros([0], np.int64)
            expected = start.first
        ranks = [dict(read_ledger(path)) if storage_of(path).exists(path) else {} for path in start.files]
        last = max((step for steps in ranks for step in steps), default=-1)
        for step in range(expected, max(last + 1, done) if start.end is None else start.end):
            parts = [steps.get(step) for steps in ranks]
            missing = [rank for rank, part in enumerate(parts) if part is None]
            numbers = np.concatenate([*(part for part in parts if part is not None), np.zeros([0], np.int64)])
            yield _step_errors(step, missing, len(numbers), start), numbers
            expected = step + 1


def _step_errors(step: int, missing: list[int], count: int, start: Start) -> list[str]:
    if missing:
        return [f"step {step}: process {missing[0]} of start {start.number} did not record it"]
    if count != start.batch_size:
        return [f"step {step}: {count} examples, where a batch has {start.batch_size}"]
    return []


def _problems(epoch: str, numbers: np.ndarray, size: int, is_complete: bool) -> list[str]:
    """Returns errors: examples not used exactly once or, in an incomplete epoch, more than once."""
    outside = numbers[(numbers < 0) | (numbers >= size)]
    if len(outside):
        return [f"{epoch}: example {outside[0]} is not among {size}"]
    counts = np.bincount(numbers, minlength=size)
    repeated, unused = np.flatnonzero(counts > 1), np.flatnonzero(counts == 0) if is_complete else np.zeros([0], int)
    return [
        *(
            [f"{epoch}: {len(repeated)} examples were used more than once, the first is {repeated[0]}"]
            if len(repeated)
            else []
        ),
        *([f"{epoch}: {len(unused)} examples were not used, the first is {unused[0]}"] if len(unused) else []),
    ]


def _run(values: Any, arguments: list[str], output: Output) -> int:
    run = command.only_argument(arguments, "tfdist ledger takes one directory.", "Give the directory of a run.")
    return main(run, output)


_EXAMPLES = ("tfdist ledger runs/one", "tfdist ledger runs/one && tfdist export --output=proved.keras runs/one")

if __name__ == "__main__":
    about = __doc__ or ""
    sys.exit(
        command.run(
            "ledger", lambda values: None, _run, about=about, arguments="RUN", examples=_EXAMPLES, has_json=True
        )
    )
