import pathlib
import time

import pytest

from tests.waiting import DEADLINE, wait_for
from tfdist.errors import InputError
from tfdist.launcher import hosts
from tfdist.launcher.hosts import matches_host, parse, read, watched_slots

pytestmark = [pytest.mark.processes, pytest.mark.waits]


def test_lines_of_a_list():
    text = "node1:2\n\n# all of it\nnode2 slots=3  # MPI's way\nnode3\n[fe80::1]:4\nnode1:1\n10.0.0.7:0\n"
    assert parse(text, "x") == {"node1": 3, "node2": 3, "node3": 1, "fe80::1": 4, "10.0.0.7": 0}
    assert parse("", "x") == {}


@pytest.mark.parametrize("line", ["node1:two", "node1:2:3", "a b", "node1=2", "node1:-1", ":2"])
def test_what_is_no_line_is_named(line):
    with pytest.raises(InputError) as raised:
        parse(f"node0\n{line}\n", "the list")
    assert str(raised.value) == f'Lines of --hosts must be NAME:SLOTS. Received: "{line}" in line 2 of the list.'


def program(path: pathlib.Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_is_run_and_a_file_is_read(tmp_path):
    (tmp_path / "file").write_text("node1:2\n")
    assert read(str(tmp_path / "file")) == {"node1": 2}
    assert read(program(tmp_path / "program", "echo node2:3")) == {"node2": 3}


@pytest.mark.parametrize(
    "text, said",
    [
        ("echo broken >&2; exit 3", "code 3 (broken)"),
        ("sleep 9", "still running after 0.1 s"),
        ("echo '# to be written'", "it lists no hosts"),
    ],
)
def test_a_program_that_fails_or_lists_nothing_is_named(tmp_path, monkeypatch, text, said):
    monkeypatch.setattr(hosts, "PROGRAM_SECONDS", 0.1 if "sleep" in text else 30.0)
    path = program(tmp_path / "program", text)
    with pytest.raises(InputError) as raised:
        read(path)
    assert str(raised.value) == f"--hosts must be a file, or a program, that lists hosts. Received: {path}: {said}."


def test_the_list_is_followed_and_stays_when_it_cannot_be_read(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(hosts, "READ_SECONDS", 0.01)
    path = tmp_path / "file"
    path.write_text("node1:2")
    with watched_slots(str(path)) as slots:
        assert slots() == {"node1": 2}
        (tmp_path / "new").write_text("node1:3")
        (tmp_path / "new").replace(path)
        wait_for(lambda: slots() == {"node1": 3})
        path.unlink()
        wait_for(lambda: caplog.messages)
        time.sleep(0.1)
        assert slots() == {"node1": 3}
    assert (
        len(caplog.messages) == 1
        and "No such file or directory. The previous list of hosts stays in use." in caplog.messages[0]
    )


def test_what_a_host_may_be_called():
    names = ["localhost", "node7.example.com", "10.0.0.7", "127.0.0.1", "::1"]
    for name in ("localhost", "node7", "node7.example.com", "10.0.0.7", "127.0.0.2", "::1"):
        assert matches_host(name, names), name
    for name in ("node8", "10.0.0.8", "10", "node", "example.com"):
        assert not matches_host(name, names), name
    assert matches_host("node7.other.example", ["node7"])
    own = hosts.local_host_names()
    assert all(matches_host(name, own) for name in own) and not {"127.0.0.1", "::1", "localhost"} & set(own)


def test_that_there_are_fewer_slots_is_believed_when_it_is_said_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "READ_SECONDS", 0.01)
    said = iter([{"a": 4}, {"a": 1}, {"a": 4}, {"a": 5}, {"a": 2}, {"a": 3}, {"a": 3}])
    seen = []
    monkeypatch.setattr(hosts, "read", lambda *arguments: next(said, {"a": 3}))
    with watched_slots("list") as slots:
        end = time.monotonic() + DEADLINE
        while slots() != {"a": 3} and time.monotonic() < end:
            seen += [slots()["a"]] if not seen or seen[-1] != slots()["a"] else []
    assert not {1, 2} & set(seen) and slots() == {"a": 3}
