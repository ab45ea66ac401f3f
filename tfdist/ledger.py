"""Prove from the records of a run that it used each example of each epoch exactly once, across restarts and resizes."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfdist.checkpoint.format import complete_checkpoints, step_of
from tfdist.cli import command
from tfdist.cli.output import TEXT, Output
from tfdist.errors import ExitCode, InputError, count_of
from tfdist.reporting import RunDirectory
from tfdist.reporting.ledger_file import read_ledger
from tfdist.storage import path_of, storage_of

_MAX_LISTED = 10
_COUNTS = ("step", "batch_size", "examples", "examples_before", "ledgers")  # of an attempt, needed for a proof


def main(run: str, output: Output = TEXT) -> int:
    """Prints the result; returns the exit code."""
    result = prove(RunDirectory(path_of(run)))
    problems = result["problems"]
    listed_problems = problems[:_MAX_LISTED]
    for problem in listed_problems:
        output.line(problem)
    if problems:
        output.line(
            f"Not proved: {count_of(len(problems), 'problem')}; the first {len(listed_problems)} are listed above."
        )
    else:
        output.line(
            f"Proved: {result['steps']} steps, {count_of(result['starts'], 'attempt')}. Each of "
            f"{result['examples_per_epoch']} examples was used exactly once in each of {result['complete_epochs']} epochs; "
            f"{result['examples_of_next_epoch']} in the next one, none twice."
        )
    shown = {"run": run, "proved": not problems, "problem_count": len(problems), "problems": listed_problems}
    output.result(result | shown)
    return ExitCode.FAILED if problems else ExitCode.DONE


def prove(directory: RunDirectory) -> dict[str, Any]:
    """Counts the examples of a run; returns the numbers of steps, attempts and examples, and the problems found."""
    starts = _starts(directory)
    size = starts[0]["examples"]
    # Nonzero if the run began within an epoch, from a checkpoint of another run.
    epoch, previous_examples = divmod(starts[0]["examples_before"], size)
    problems = [  # epochs are undefined if the size of the dataset has changed
        f"attempt {start['number']}: an epoch has {start['examples']} examples, but the run began with {size}"
        for start in starts
        if start["examples"] != size
    ]
    steps = epochs = 0
    parts, count = [np.zeros([0], np.int64)], 0  # examples of the current epoch
    for errors, step_examples in _stream(starts, directory):
        problems += errors
        steps += 1
        parts.append(step_examples)
        count += len(step_examples)
        while count >= size - previous_examples:
            epoch_examples, rest = np.split(np.concatenate(parts), [size - previous_examples])
            parts, count = [rest], len(rest)
            problems += _problems(f"epoch {epoch}", epoch_examples, size, is_complete=not previous_examples)
            epoch, epochs, previous_examples = epoch + 1, epochs + (not previous_examples), 0
    problems += _problems(f"epoch {epoch}, which has not ended", np.concatenate(parts), size, is_complete=False)
    return {
        "steps": steps,
        "starts": len(starts),
        "examples_per_epoch": size,
        "complete_epochs": epochs,
        "examples_of_next_epoch": count,
        "problems": problems,
    }


def _starts(directory: RunDirectory) -> list[dict[str, Any]]:
    """Returns the records of the attempts whose steps were not all repeated by a later one.

    Each record also has the attempt's number, counted from 0, and its end: the first step that a later attempt ran, or None.
    """
    records = directory.read_starts()
    if not records:
        raise InputError(
            f"A ledger must be in a run's directory. Received: {directory.path}, which contains no run. Pass the "
            "directory of a run."
        )
    if any(start.get("trains_clients") for start in records):
        raise InputError(
            "A ledger proves that each epoch uses each example once, but clients are sampled at random. Received: "
            f"{directory.path}, a run with --sync=fedavg. Its ledger files list the examples that each step used."
        )
    ends = [start["step"] for start in records[1:]]
    starts = [{**start, "number": n, "end": min(ends[n:], default=None)} for n, start in enumerate(records)]
    starts = [start for start in starts if start["end"] is None or start["end"] > start["step"]]  # others were repeated
    missing = [f"{start['number']} (from step {start['step']})" for start in starts if not start.get("ledgers")]
    if missing:
        location = f"without either in attempt {', '.join(missing)}, counted from 0"
        raise InputError(
            f"A ledger needs --checkpoint_every or --commit_every in each attempt of a run. Received: {directory.path}, "
            f"{location}. Such an attempt cannot be proved: pass one of these flags in each attempt of the next run."
        )
    for start in starts:
        _check_counts(start, directory)
    return starts


def _check_counts(start: Mapping[str, Any], directory: RunDirectory) -> None:
    for name in _COUNTS:
        minimum, limit = int(name in ("batch_size", "examples")), 1 << 20 if name == "ledgers" else 1 << 62
        value = start.get(name)
        if type(value) is not int or not minimum <= value < limit:
            raise InputError(
                f"Each attempt of a run must record {name} as an integer of at least {minimum}. Received: {str(value):.80}, in "
                f"attempt {start['number']} of {directory.starts}, counted from 0. Restore the file."
            )


def _stream(starts: list[dict[str, Any]], directory: RunDirectory) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yields the errors of each step that was not repeated, and its examples in the order of use."""
    expected = starts[0]["step"]
    checkpoint_steps = [step_of(path) for path in complete_checkpoints(directory.checkpoints)]
    completed_steps = max([0, *checkpoint_steps, *(record["step"] for record in directory.records())])
    for start in starts:
        if start["step"] > expected:
            yield [f"steps {expected} to {start['step'] - 1}: not recorded"], np.zeros([0], np.int64)
            expected = start["step"]
        files = [directory.ledger(start["number"], rank) for rank in range(start["ledgers"])]
        ledgers = [dict(read_ledger(path)) if storage_of(path).exists(path) else {} for path in files]
        last = max((step for ledger in ledgers for step in ledger), default=-1)
        end = max(last + 1, completed_steps) if start["end"] is None else start["end"]
        for step in range(expected, end):
            parts = [ledger.get(step) for ledger in ledgers]
            missing = [rank for rank, part in enumerate(parts) if part is None]
            examples = np.concatenate([*(part for part in parts if part is not None), np.zeros([0], np.int64)])
            errors = []
            if missing:
                errors = [f"step {step}: process {missing[0]} of attempt {start['number']} did not record it"]
            elif len(examples) != start["batch_size"]:
                errors = [f"step {step}: {len(examples)} examples, but a batch has {start['batch_size']}"]
            yield errors, examples
            expected = step + 1


def _problems(epoch: str, indices: np.ndarray, size: int, is_complete: bool) -> list[str]:
    """Returns errors: examples that were not used exactly once or, in an incomplete epoch, used more than once."""
    invalid_indices = indices[(indices < 0) | (indices >= size)]
    if len(invalid_indices):
        return [f"{epoch}: example {invalid_indices[0]} is not among {size}"]
    counts = np.bincount(indices, minlength=size)
    repeated, unused = np.flatnonzero(counts > 1), np.flatnonzero((counts == 0) & is_complete)
    return [
        f"{epoch}: {len(examples)} examples were {error}, the first is {examples[0]}"
        for examples, error in ((repeated, "used more than once"), (unused, "not used"))
        if len(examples)
    ]


_EXAMPLES = ("tfdist ledger runs/one", "tfdist ledger runs/one && tfdist export --output=proved.keras runs/one")

if __name__ == "__main__":
    sys.exit(command.run("ledger", None, main, about=__doc__, arguments="RUN", has_json=True, examples=_EXAMPLES))
