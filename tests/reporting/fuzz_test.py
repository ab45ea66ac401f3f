"""Run directories with arbitrary contents: `make fuzz` tries many, `make test` a few."""

import json
import pathlib
import shutil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.arbitrary import VALUES, near
from tfdist import ledger
from tfdist.errors import InputError
from tfdist.reporting.run_directory import RunDirectory
from tfdist.storage import path_of

pytestmark = pytest.mark.fuzz


def lines(record: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Lines of JSON near the record, or anything else."""
    texts = (near(record) | VALUES).map(lambda value: json.dumps(value).encode())
    return st.lists(st.one_of(texts, texts, st.binary(max_size=20)), max_size=4).map(b"\n".join)


STARTS = lines(
    {"step": 0, "batch_size": 2, "examples": 4, "examples_before": 0, "ledgers": 1, "flags": [], "checkpoint": ""}
)
METRICS = lines({"step": 1, "kind": "train", "loss": 1.0})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(starts=STARTS, metrics=METRICS, step=st.integers(0, 3))
def test_files_of_a_run(tmp_path: pathlib.Path, starts: bytes, metrics: bytes, step: int) -> None:
    """They are read or refused by name, and a run that begins there loses no start."""
    path = tmp_path / "run"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    (path / "starts.jsonl").write_bytes(starts)
    (path / "metrics.jsonl").write_bytes(metrics)
    directory = RunDirectory(path_of(str(path)))
    refused = _refusal(directory.read_starts)
    assert refused is None or "starts.jsonl must describe a start" in refused
    _refusal(lambda: ledger.main(str(path)))
    assert all(isinstance(record["step"], int) for record in directory.records())
    directory.begin("--seed=1\n", ["host"], step=step)
    assert (path / "starts.jsonl").read_bytes().startswith(starts)
    assert all(record["step"] <= step for record in directory.records())


def _refusal(call: Any) -> str | None:
    try:
        call()
    except InputError as error:
        assert "\n" not in str(error)
        return str(error)
    return None
