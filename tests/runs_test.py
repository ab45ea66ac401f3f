"""The command that lists and compares runs."""

import os
import re
import sys

import pytest

from tests import documented_json
from tests.reporting.run_summary_test import RECORDS, start, write
from tests.user_commands import captured
from tfdist import runs
from tfdist.errors import InputError
from tfdist.runs import RunsConfig


@pytest.fixture
def home(tmp_path):
    """Two runs, a directory that is none, one whose records are damaged, logs of a launcher, and a file."""
    home = tmp_path / "runs"
    write(home / "older", [start(0, 1000.0, strategy="single")], outcome="done")
    worse = [{**record, "accuracy": 0.25} for record in RECORDS]
    write(home / "newer", [start(0, 2000.0, strategy="mirrored")], worse, outcome="preempted")
    for directory, file in (("foreign", "photo.png"), ("launch-1/logs", "rank-0.log")):
        (home / directory).mkdir(parents=True)
        (home / directory / file).write_text("")
    (write(home / "damaged") / "starts.jsonl").write_text("{")
    (home / "notes.txt").write_text("mine")
    return home


def names(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()[1:]]


@pytest.mark.smoke("runs")
def test_runs_are_listed_and_others_named(home, capsys):
    assert runs.main([str(home)], RunsConfig()) == 0
    out, err = capsys.readouterr()
    assert names(out) == ["older", "newer"]
    assert re.search(r" finished .* preempted ", out.replace("\n", " "))
    assert err.startswith("Skipped: damaged (Each line of ") and err.endswith(
        "foreign (it is not the directory of a run).\n"
    )
    assert not (home / "comparison.png").exists()


@pytest.mark.parametrize("name", ["starts.jsonl", "metrics.jsonl", "outcome.json", "lock", "finished.json"])
@pytest.mark.parametrize("what", ["pipe", "link", "digits"])
def test_no_file_of_a_run_hides_other_runs(home, capsys, name, what):
    path = home / "older" / name
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_text(f'{{"step": {"9" * 401}, "kind": "eval", "loss": {"9" * 401}, "time": {"9" * 401}}}\n')
    assert runs.main([str(home)], RunsConfig()) == 0
    assert "newer" in names(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"sort": "accuracy"}, ["newer", "older"]),
        ({"sort": "run", "limit": 1}, ["older"]),
        ({"sort": "loss"}, ["older", "newer"]),
        ({"filter": "strategy=mirror*"}, ["newer"]),
        ({"filter": "status=finished,optimizer=sgd(momentum=0.9)"}, ["older"]),
    ],
)
def test_order_and_selection(home, config, wanted, capsys):
    runs.main([str(home)], RunsConfig(**config))
    assert names(capsys.readouterr().out) == wanted


def test_nothing_matches(home, capsys):
    runs.main([str(home)], RunsConfig(filter="status=running"))
    assert capsys.readouterr().out == "None of 2 runs matches --filter=status=running.\n"


def test_a_comparison(home, capsys):
    assert runs.main([str(home / "older"), str(home / "newer")], RunsConfig()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["All", "flags", "of", "the", "2", "runs", "are", "equal,", "except", "--output_dir."]
    assert [line.split()[-2:] for line in lines if line.startswith("best accuracy")] == [["0.2500", "@1"]]
    assert lines[-1] == f"curves: {home}/comparison.png"
    assert (home / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_comparison_of_a_directory_with_other_metrics(home, tmp_path, capsys):
    path = tmp_path / "new" / "a.png"
    runs.main([str(home)], RunsConfig(output=str(path), metric="accuracy", axis="time"))
    assert capsys.readouterr().out.splitlines()[-1] == f"curves: {path}"
    assert path.is_file()


def test_runs_of_one_name_are_told_apart_by_their_paths(home, tmp_path, capsys):
    write(tmp_path / "others" / "older")
    record = documented_json.printed("runs", runs.main, [str(home), str(tmp_path / "others")], RunsConfig())
    assert capsys.readouterr() == ("", "")
    assert len(record["skipped"]) == 2
    assert {run["run"] for run in record["runs"]} == {f"{home}/older", "newer", f"{tmp_path}/others/older"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sort": "acuracy"}, '--sort=acuracy is not known. Did you mean "accuracy"?'),
        ({"metric": "acuracy"}, '--metric=acuracy is not in these runs. Did you mean "accuracy"?'),
        ({"output": "/proc/a.png"}, "--output must be a writable path. Received: /proc/a.png"),
    ],
)
def test_what_is_refused(home, config, message):
    with pytest.raises(InputError, match=message):
        runs.main([str(home)], RunsConfig(**config))


def test_the_command_imports_neither_tensorflow_nor_matplotlib(home):
    """Flags may follow the directory."""
    command = [sys.executable, "-X", "importtime", "-m", "tfdist.runs", str(home), "--sort=run", "--limit", "1"]
    done = captured(command)
    assert done.returncode == 0 and names(done.stdout) == ["older"]
    assert not re.search(r"\| +(tensorflow|keras|matplotlib)$", done.stderr, re.MULTILINE)
