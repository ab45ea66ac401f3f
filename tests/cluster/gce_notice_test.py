"""Notices of the platform, from a metadata server that responds like that of Google Compute Engine."""

import contextlib
import http.server
import threading
import time
import types
from collections.abc import Iterator

import pytest

from tests.end_to_end.resume.exact_test import fit, make_trainer
from tests.end_to_end.resume.saving_test import At, heard, steps_of
from tests.waiting import DEADLINE, wait_for
from tfdist.cluster import gce_notice
from tfdist.errors import Preempted

pytestmark = [pytest.mark.processes, pytest.mark.waits]


class Metadata:
    """A metadata server with given values by path; other paths are not found."""

    def __init__(self) -> None:
        self.said = {"instance/preempted": "FALSE", "instance/maintenance-event": "NONE"}
        self.asked = threading.Event()
        self.speaks = threading.Event()
        self.speaks.set()
        metadata = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802
                assert self.headers["Metadata-Flavor"] == "Google"
                metadata.asked.set()
                metadata.speaks.wait(DEADLINE)
                text = metadata.said.get(self.path.removeprefix("/computeMetadata/v1/"))
                self.send_response(200 if text else 404)
                self.end_headers()
                with contextlib.suppress(OSError):  # the client may be gone
                    self.wfile.write((text or "").encode())

            def log_message(self, *args: object) -> None:
                """Logs nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def wait(self) -> None:
        """Waits until it has been polled again, and has answered."""
        for _ in range(4):  # there are two requests a poll, one after the other
            self.asked.clear()
            assert self.asked.wait(DEADLINE)


class Soon(threading.Event):
    """Lets the pauses between two polls be short."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(0.05)


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    made = Metadata()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{made.server.server_address[1]}")
    monkeypatch.setattr(gce_notice, "POLL_SECONDS", DEADLINE)  # for an answer
    monkeypatch.setattr(gce_notice, "threading", types.SimpleNamespace(Event=Soon, Thread=threading.Thread))
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def noticed(metadata: Metadata) -> Iterator[list[str]]:
    """The notices since the first poll."""
    paths: list[str] = []
    with gce_notice.machine_notices(paths.append):
        metadata.wait()
        yield paths


@pytest.mark.parametrize(
    ("path", "word"),
    [("instance/preempted", "TRUE"), ("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")],
)
def test_a_notice_is_told_once(path, word, metadata, noticed):
    assert noticed == []
    metadata.said[path] = word
    wait_for(lambda: noticed)
    time.sleep(0.3)
    assert noticed == [path]


def test_a_server_that_is_away_is_asked_again(metadata, noticed):
    saved, metadata.said = metadata.said, {}
    metadata.wait()
    metadata.said = saved | {"instance/preempted": "TRUE"}
    wait_for(lambda: noticed)
    assert noticed == ["instance/preempted"]


def test_a_notice_that_stood_before_is_none_but_may_be_given_again_when_it_was_taken_back(metadata):
    path, word = "instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"
    metadata.said[path] = word
    noticed: list[str] = []
    with gce_notice.machine_notices(noticed.append):
        metadata.wait()
        saved, metadata.said = metadata.said, {}  # a missing answer does not withdraw the notice
        metadata.wait()
        metadata.said = saved
        metadata.wait()
        assert noticed == []
        metadata.said[path] = "NONE"
        metadata.wait()
        metadata.said[path] = word
        wait_for(lambda: noticed)
    assert noticed == [path]


def test_elsewhere_nobody_is_asked(monkeypatch, tmp_path):
    monkeypatch.delenv("GCE_METADATA_IP", raising=False)
    for product in (tmp_path / "missing", tmp_path / "other"):
        monkeypatch.setattr(gce_notice, "_PRODUCT", product)
        before = {*threading.enumerate()}
        with gce_notice.machine_notices(print):
            assert {*threading.enumerate()} <= before
        (tmp_path / "other").write_text("Standard PC")


def test_a_run_on_such_a_machine_is_saved(metadata, single, tmp_path, caplog, monkeypatch):
    preempt = heard(monkeypatch, lambda: metadata.said.update({"instance/preempted": "TRUE"}))
    with pytest.raises(Preempted, match=r"saved at step \d+ in"):
        fit(make_trainer(single), tmp_path, every="0", callbacks=[At(4, preempt)])
    [stopped] = steps_of(tmp_path)
    assert stopped >= 4
    assert "will stop this machine (instance/preempted)" in caplog.text
