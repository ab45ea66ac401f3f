"""The command as started by users: a table, a file and a plot; mistakes are in tests/cli/wrong_uses.tsv."""

import json
import os
import sys

import pytest

from tests import documented_json
from tests.user_commands import captured
from tfdist import bench
from tfdist.cluster import environment
from tfdist.planning import benchmark_results
from tfdist.planning.benchmark_results import TRAFFIC

pytestmark = pytest.mark.processes

MIRRORED = ("--strategy=mirrored", "--repeat_seconds=0")


@pytest.mark.smoke("bench")
def test_algorithms_are_compared_by_size(tmp_path, capsys):
    flags = ("--devices=4", "--topology=2,2", "--sizes=64,1KB", "--repeats=1")
    path = tmp_path / "out"
    assert bench.start(["bench", "collectives", *MIRRORED, *flags, "--all_reduce=all", f"--output_dir={path}"]) == 0
    _, header, *rows, _ = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "all_reduce"
    algorithms = ["engine", "ring", "tree", "halving_doubling", "hierarchical"]
    assert [row.split()[0] for row in rows] == 2 * algorithms
    records = [json.loads(line) for line in (path / "collectives.jsonl").read_text().splitlines()]
    assert [record["algorithm"] for record in records] == 2 * algorithms
    assert {record["operation"] for record in records} == {"all_reduce"}


def test_json_says_what_the_files_say(tmp_path, capfd):
    path = tmp_path / "out"
    flags = ("--devices=2", "--sizes=64", "--repeats=2", "--dtype=int32")
    assert bench.start(["bench", "collectives", *MIRRORED, *flags, "--json", f"--output_dir={path}"]) == 0
    record = json.loads(capfd.readouterr().out)
    documented_json.check("bench", record)
    assert record["output_dir"] == str(path) and record["replicas"] == 2
    lines = [json.loads(line) for line in (path / "collectives.jsonl").read_text().splitlines()]
    assert [{"schema": 2, **one} for one in record["measurements"]] == lines
    assert [one["operation"] for one in lines] == list(TRAFFIC)
    assert (path / "environment.json").exists()
    assert "--json" not in (path / "flags.txt").read_text()


def test_two_processes(tmp_path):
    pytest.importorskip("horovod")
    flags = ("--sizes=4,64KB", "--repeats=3", "--repeat_seconds=0.01", "--output_dir=out")
    launched = ("tfdist.launch", "--processes=2", "--launcher=horovod", "--log_dir=logs", "--", sys.executable, "-m")
    variables = environment.without_rank_variables({**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    command = [sys.executable, "-m", *launched, "tfdist.bench", "collectives", *flags]
    done = captured(command, cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines() if line.startswith("[0] ")]
    assert not [line for line in done.stdout.splitlines() if line.startswith("[1] ")], "the chief alone speaks"
    rows = lines[lines.index(benchmark_results.header()) + 1 : -1]
    assert lines[-1] == "out"
    records = [json.loads(line) for line in (tmp_path / "out/collectives.jsonl").read_text().splitlines()]
    measured = [(record["operation"], record["bytes"]) for record in records]
    assert [name for name, _ in measured] == [row.split()[0] for row in rows]
    small = {"all_reduce": 4, "broadcast": 4}
    assert measured == [
        (name, size) for name in TRAFFIC for size in ((0,) if name == "barrier" else (small.get(name, 8), 65536))
    ]
    assert all(len(record["seconds"]) == 3 and record["replicas"] == 2 for record in records)
    # Two processes cannot synchronize faster: a shorter time would mean that nothing was sent.
    assert all(record["seconds_min"] > 2e-5 for record in records), records
    assert "--sizes=4,64KB" in (tmp_path / "out/flags.txt").read_text()
