"""The final state of a run, read from its directory, and comparison of two of them."""

import contextlib
import io
import json
import math
import pathlib
from typing import Any, NamedTuple

from tests.end_to_end.chaos.settings import STEPS
from tfdist import ledger
from tfdist.checkpoint.format import Checkpoint

_COMPARED = ("kind", "step", "epoch", "loss", "accuracy", "learning_rate", "gradient_norm")  # no times


class Ending(NamedTuple):
    """The final state, which must not depend on interruptions."""

    tensors: dict[str, Any]  # of the last checkpoint, with the hashes of their bytes
    values: dict[str, Any]  # other values of the last checkpoint
    records: list[dict[str, Any]]  # of metrics.jsonl, without times
    proof: str  # what is wrong with the ledger; empty if each example of each epoch was used once


def ending(directory: pathlib.Path, steps: int = STEPS) -> Ending:
    checkpoint = Checkpoint.open(directory / "checkpoints" / f"step-{steps:09d}")
    checkpoint.verify()
    return Ending(dict(checkpoint.tensors), dict(checkpoint.values), _records(directory), _proof(directory, steps))


def differences(found: Ending, reference: Ending) -> list[str]:
    """Describes the differences; empty if the two are bitwise equal."""
    names = sorted(found.tensors.keys() | reference.tensors.keys())
    return [
        *(f"tensor {name}" for name in names if found.tensors.get(name) != reference.tensors.get(name)),
        *(f"value {name}" for name in found.values if found.values[name] != reference.values.get(name)),
        *_of_records(found.records, reference.records),
        *([found.proof] if found.proof else []),
    ]


def _of_records(found: list[dict[str, Any]], reference: list[dict[str, Any]]) -> list[str]:
    if len(found) != len(reference):
        return [f"{len(found)} records, not {len(reference)}"]
    return [
        f"record {one}, not {other}" for one, other in zip(found, reference, strict=True) if not _are_equal(one, other)
    ]


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether records are equal, up to the order in which workers that are left add the sums of an evaluation."""
    if one["kind"] != "eval":
        return one == other
    return one | {"loss": 0} == other | {"loss": 0} and math.isclose(one["loss"], other["loss"], rel_tol=1e-6)


def _records(directory: pathlib.Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: record.get(name) for name in _COMPARED} for record in map(json.loads, lines)]


def _proof(directory: pathlib.Path, steps: int) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = ledger.main(str(directory))
    text = said.getvalue()
    return "" if code == 0 and f"Proved: {steps} steps" in text else text.strip()
