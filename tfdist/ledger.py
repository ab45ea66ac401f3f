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
    """A start of the run, and its steps that count for the result.

    Attributes:
      number: number of the start, from 0.
      first_step: its first step.
      end_step: step after its last one that counts, because later ones were repeated; None for the last start.
      examples_before: number of examples used before its first step.
      batch_size: number of examples per step.
      examples: number of examples per epoch.
      files: ledgers of the processes, by rank.
    """

    number: int
    first_step: int
    end_step: int | None
    examples_before: int
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
      next_examples: number of examples used in the incomplete epoch.
      problems: descriptions of errors.
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
    listed_problems = proof.problems[:_MAX_LISTED]
    for problem in listed_problems:
        output.line(problem)
    if proof.problems:
        output.line(f"Not proved: {len(proof.problems)} problems; the first {len(listed_problems)} are listed above.")
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
            "problems": listed_problems,
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
    epoch, previous_examples = divmod(
        starts[0].examples_before, size
    )  # not 0 if the run began with a checkpoint of another one
    steps, epochs = 0, 0
    problems = _size_errors(starts)
    index_arrays: list[np.ndarray] = []  # of the current epoch
    count = 0
    for errors, numbers in _stream(starts, _completed_steps(directory)):
        problems += errors
        steps += 1
        index_arrays.append(numbers)
        count += len(numbers)
        while count >= size - previous_examples:
            remaining_indices = np.concatenate(index_arrays)
            problems += _problems(
                f"epoch {epoch}", remaining_indices[: size - previous_examples], size, is_complete=not previous_examples
            )
            index_arrays = [remaining_indices[size - previous_examples :]]
            epoch, count, epochs, previous_examples = (
                epoch + 1,
                len(index_arrays[0]),
                epochs + (not previous_examples),
                0,
            )
    remaining_indices = np.concatenate([np.zeros([0], np.int64), *index_arrays])
    problems += _problems(f"epoch {epoch}, which has not ended", remaining_indices, size, is_complete=False)
    return Proof(steps, len(starts), size, epochs, len(remaining_indices), problems)


def _starts(directory: RunDirectory) -> list[Start]:
    records = directory.read_starts()
    if not records:
        raise InputError(
            f"A ledger must be in a run's directory. Received: {directory.path}, which records no start. Give the "
            "directory of a run."
        )
    if any(start.get("trains_clients") for start in records):
        raise InputError(
            "A ledger proves that each epoch uses each example once, but clients are sampled at random. Received: "
            f"{directory.path}, a run with --sync=fedavg. Its ledger files say which examples each of its steps used."
        )
    ends = [start["step"] for start in records[1:]] + [None]
    ends_by_number = [_earliest(ends[number:]) for number in range(len(records))]
    counted_starts = [  # starts with steps that were not repeated
        number for number, end in enumerate(ends_by_number) if end is None or end > records[number]["step"]
    ]
    _check_has_ledgers(records, counted_starts, directory)
    for number in counted_starts:
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
        for number in counted_starts
    ]


def _check_counts(number: int, start: dict[str, Any], directory: RunDirectory) -> None:
    ranges = {
        "step": (0, _MAX_COUNT),
        "batch_size": (1, _MAX_COUNT),
        "examples": (1, _MAX_COUNT),
        "examples_before": (0, _MAX_COUNT),
        "ledgers": (0, 1 << 20),
    }
    for name, (minimum, limit) in ranges.items():
        value = start.get(name)
        if type(value) is not int or not minimum <= value < limit:
            raise InputError(
                f"A start of a run must have a count as its {name}. Received: {str(value):.80}, at start {number} in "
                f"{directory.starts}, counted from 0. Restore the file."
            )


def _check_has_ledgers(records: list[dict[str, Any]], counted_starts: list[int], directory: RunDirectory) -> None:
    missing = [
        f"{number} (from step {records[number]['step']})"
        for number in counted_starts
        if not records[number].get("ledgers")
    ]
    if missing:
        location = f"without either at start {', '.join(missing)}, counted from 0"
        raise InputError(
            f"A ledger needs --checkpoint_every or --commit_every at each start of a run. Received: {directory.path}, "
            f"{location}. Such a start cannot be proved: give one of these flags to each start of the next run."
        )


def _size_errors(starts: list[Start]) -> list[str]:
    """Returns errors if the size of the data set has changed, because epochs are then undefined."""
    return [
        f"start {start.number}: an epoch has {start.examples} examples, where the run began with {starts[0].examples}"
        for start in starts
        if start.examples != starts[0].examples
    ]


def _completed_steps(directory: RunDirectory) -> int:
    checkpoint_steps = [step_of(path) for path in newest(directory.checkpoints)]
    return max([0, *checkpoint_steps, *(record["step"] for record in directory.records())])


def _earliest(steps: list[int | None]) -> int | None:
    known_steps = [step for step in steps if step is not None]
    return min(known_steps) if known_steps else None


def _stream(starts: list[Start], completed_steps: int) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yields the errors of each step that counts, and its examples in the order of use."""
    expected = starts[0].first_step
    for start in starts:
        if start.first_step > expected:
            yield [f"steps {expected} to {start.first_step - 1}: not recorded"], np.zeros([0], np.int64)
            expected = start.first_step
        ranks = [dict(read_ledger(path)) if storage_of(path).exists(path) else {} for path in start.files]
        last = max((step for steps in ranks for step in steps), default=-1)
        for step in range(expected, max(last + 1, completed_steps) if start.end_step is None else start.end_step):
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
    """Returns errors: examples that were not used exactly once or, in an incomplete epoch, used more than once."""
    invalid_indices = numbers[(numbers < 0) | (numbers >= size)]
    if len(invalid_indices):
        return [f"{epoch}: example {invalid_indices[0]} is not among {size}"]
    counts = np.bincount(numbers, minlength=size)
    repeated_examples, unused_examples = (
        np.flatnonzero(counts > 1),
        np.flatnonzero(counts == 0) if is_complete else np.zeros([0], int),
    )
    return [
        *(
            [
                f"{epoch}: {len(repeated_examples)} examples were used more than once, the first is {repeated_examples[0]}"
            ]
            if len(repeated_examples)
            else []
        ),
        *(
            [f"{epoch}: {len(unused_examples)} examples were not used, the first is {unused_examples[0]}"]
            if len(unused_examples)
            else []
        ),
    ]


_EXAMPLES = ("tfdist ledger runs/one", "tfdist ledger runs/one && tfdist export --output=proved.keras runs/one")

if __name__ == "__main__":
    sys.exit(command.run("ledger", None, main, about=__doc__, arguments="RUN", has_json=True, examples=_EXAMPLES))
