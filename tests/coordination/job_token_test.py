"""The token of a job: where it comes from, and which jobs do not start without one."""

import os
import pwd
import re
import stat
import subprocess
import threading

import pytest

from tests.waiting import DEADLINE
from tfdist.coordination.job_token import group_token, job_token, user_token
from tfdist.errors import InputError

REMOTE, LOCAL = "node1.example.com:14000", "127.0.0.1:14000"
SECRET = "a secret of the job"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_the_variable_comes_before_the_file(file):
    assert job_token({"TFDIST_TOKEN_FILE": str(file)}, REMOTE) == SECRET
    assert job_token({"TFDIST_TOKEN_FILE": str(file), "TFDIST_TOKEN": "of the launcher of a job"}, REMOTE) == (
        "of the launcher of a job"
    )


@pytest.mark.parametrize("source", ["variable", "file"])
def test_whitespace_around_a_token_does_not_belong_to_it(source, file):
    file.write_text(f" {SECRET}\t\r\n")
    variables = {"TFDIST_TOKEN": f" {SECRET}\t\r\n"} if source == "variable" else {"TFDIST_TOKEN_FILE": str(file)}
    assert user_token(variables) == job_token(variables, REMOTE) == SECRET
    assert user_token({"TFDIST_TOKEN": " \n", "TFDIST_TOKEN_FILE": str(file)}) == SECRET
    assert user_token({"TFDIST_TOKEN": " \n"}) == ""


def test_a_home_that_does_not_exist_is_bad_input(monkeypatch):
    with pytest.raises(InputError, match=r"Received: ~no-such-user/token \(No such file or directory\)"):
        job_token({"TFDIST_TOKEN_FILE": "~no-such-user/token"}, REMOTE)

    def unknown(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME")
    with pytest.raises(InputError, match=r"Received: ~/.cache/tfdist/token \(Could not determine home.*XDG_CACHE_HOME"):
        job_token({}, LOCAL)


def test_without_a_home_the_key_may_be_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert job_token({"XDG_CACHE_HOME": str(tmp_path)}, LOCAL) == job_token({"XDG_CACHE_HOME": str(tmp_path)}, LOCAL)


def test_a_file_of_the_home_directory(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    assert user_token({"TFDIST_TOKEN_FILE": "~/token"}) == SECRET


@pytest.mark.parametrize(
    "address", [REMOTE, "10.0.0.1:1", "0.0.0.0:1", "[::]:1", "[fe80::1%eth0]:1", "localhost.example.com:1"]
)
def test_a_job_that_others_can_reach_needs_a_token(address):
    with pytest.raises(InputError, match="needs a secret token.*TFDIST_TOKEN_FILE.*umask 077.*--insecure") as info:
        job_token({}, address)
    assert address in str(info.value) and "\n" not in str(info.value)


@pytest.mark.parametrize("address", [LOCAL, "127.8.9.10:1", "localhost:1", "[::1]:1"])
def test_a_job_on_the_loopback_needs_no_token(address):
    assert len(job_token({}, address)) == 64


def test_the_command_of_the_message_makes_a_token(tmp_path, monkeypatch):
    """It is run as it is printed."""
    with pytest.raises(InputError) as info:
        job_token({}, REMOTE)
    (command,) = re.findall(r"\(umask 077; .*?> ~/tfdist_token\)", str(info.value))
    subprocess.run(["sh", "-c", command], env={**os.environ, "HOME": str(tmp_path)}, check=True)
    assert len(job_token({"TFDIST_TOKEN_FILE": str(tmp_path / "tfdist_token")}, REMOTE)) == 64


@pytest.mark.parametrize("text", ["1", "true"])
def test_a_job_without_a_token_must_be_allowed(text, caplog):
    tokens = {job_token({"TFDIST_INSECURE": text}, REMOTE, described) for described in ("one job", "another")}
    assert len(tokens) == 2
    assert f"anyone who can reach {REMOTE} can join it" in caplog.text
    caplog.clear()
    job_token({"TFDIST_INSECURE": text}, REMOTE, warns=False)
    assert not caplog.text
    for other in ("0", "False ", "no", ""):
        with pytest.raises(InputError):
            job_token({"TFDIST_INSECURE": other}, REMOTE)


@pytest.mark.parametrize("source", ["variable", "file"])
def test_a_token_that_can_be_guessed_is_refused(source, file):
    file.write_text("short" + " " * 20)
    variables = {"TFDIST_TOKEN": "short" + " " * 20} if source == "variable" else {"TFDIST_TOKEN_FILE": str(file)}
    with pytest.raises(InputError, match="must have at least 16 characters.*Received: 5"):
        job_token(variables, REMOTE)
    assert job_token(variables, LOCAL) == "short"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_of_others_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(InputError, match=rf"no one else may read or write.*mode {mode:04o}\. Run: chmod 600 {file}"):
        job_token({"TFDIST_TOKEN_FILE": str(file)}, LOCAL)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(file):
    os.chown(file, 12345, 12345)
    with pytest.raises(InputError, match="owner 12345"):
        job_token({"TFDIST_TOKEN_FILE": str(file)}, LOCAL)


def test_a_file_that_is_none_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)  # must not block
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name, reason in (("fifo", "regular"), ("empty", "not be empty"), ("folder", "director"), ("none", "No such")):
        with pytest.raises(InputError, match=reason):
            job_token({"TFDIST_TOKEN_FILE": str(tmp_path / name)}, REMOTE)


def test_without_a_token_a_job_of_one_host_has_a_key_of_its_user(tmp_path):
    variables = {"HOME": str(tmp_path)}
    tokens = [job_token(variables, LOCAL, "job") for _ in range(2)]
    assert tokens[0] == tokens[1] != job_token({"HOME": str(tmp_path / "other")}, LOCAL, "job")
    assert len({*tokens, job_token(variables, LOCAL, "another"), job_token(variables, "127.0.0.1:2", "job")}) == 3
    key = tmp_path / ".cache" / "tfdist" / "token"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_text() not in tokens
    assert [each.name for each in key.parent.iterdir()] == ["token"]


def test_processes_that_start_together_have_the_same_key(tmp_path):
    variables, tokens = {"XDG_CACHE_HOME": str(tmp_path)}, []
    barrier = threading.Barrier(16)

    def start():
        barrier.wait()
        tokens.append(job_token(variables, LOCAL))

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(tokens) == 16 and len(set(tokens)) == 1


@pytest.mark.parametrize("change", ["mode", "empty", "folder", "directory"])
def test_a_key_that_is_not_the_user_s_own_is_refused(tmp_path, change):
    """Nothing that others can compute takes its place."""
    variables = {"XDG_CACHE_HOME": str(tmp_path)}
    job_token(variables, LOCAL)
    key = tmp_path / "tfdist" / "token"
    if change == "mode":
        key.chmod(0o644)
    elif change == "empty":
        key.write_text("")
    else:
        key.unlink()
        key.mkdir() if change == "folder" else (key.parent.rmdir(), key.parent.write_text("a file"))
    with pytest.raises(InputError, match=rf"need a key that only their user can read. Received: {key} \(") as info:
        job_token(variables, LOCAL)
    assert "\n" not in str(info.value)
    assert len(job_token(variables | {"TFDIST_INSECURE": "1"}, LOCAL)) == 64


def test_without_home_the_key_is_in_that_of_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(
        pwd, "getpwuid", lambda user: pwd.struct_passwd(("u", "x", user, 1, "", str(tmp_path), "/bin/sh"))
    )
    assert job_token({}, LOCAL) == job_token({"HOME": str(tmp_path)}, LOCAL)


def test_groups_with_the_same_secret_have_different_tokens_whatever_the_host_is_called():
    assert group_token(SECRET, "rank", "node1:14000") == group_token(SECRET, "rank", "[::1]:14000") != SECRET
    assert len({group_token(SECRET, role, f"node1:{port}") for role in ("rank", "node") for port in (1, 2)}) == 4
