"""Preemption and maintenance notices of Google Compute Engine, which precede a signal."""

import contextlib
import http.client
import logging
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_SECONDS = 5.0  # a preemptible machine has 30 s from its notice
_NOTICES = {"instance/preempted": "TRUE", "instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
_PRODUCT = Path("/sys/class/dmi/id/product_name")

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def machine_notices(on_notice: Callable[[str], object]) -> Iterator[None]:
    """Polls Google Compute Engine for notices during training; does nothing on other platforms.

    Sends the same requests as TensorFlow's failure handling, to the metadata server of Google Compute Engine, or the one at
    GCE_METADATA_IP. Notices that are active when training begins are ignored, because they have already stopped an earlier
    run, and maintenance may be announced an hour ahead.

    Args:
      on_notice: called once, from another thread, with the name of the notice; must return quickly.
    """
    try:
        is_compute_engine = "GCE_METADATA_IP" in os.environ or "Google Compute Engine" in _PRODUCT.read_text(
            "ascii", "replace"
        )
    except OSError:
        is_compute_engine = False
    if not is_compute_engine:
        yield
        return
    ended = threading.Event()
    # Not joined, because it may be waiting for a response.
    threading.Thread(target=_watch, args=(on_notice, ended), name="tfdist-machine-notice", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(on_notice: Callable[[str], object], ended: threading.Event) -> None:
    ignored_notices = _active_notices() or set()
    while not ended.wait(POLL_SECONDS):
        active_notices = _active_notices()
        if active_notices is None:
            continue
        new_notices = active_notices - ignored_notices
        ignored_notices &= active_notices  # a withdrawn notice may be repeated
        if new_notices and not ended.is_set():
            name = min(new_notices)
            _log.warning(
                "Google Compute Engine will stop this machine (%s): saving, and stopping at a step agreed by all processes.",
                name,
            )
            on_notice(name)
            return


def _active_notices() -> set[str] | None:
    """Returns the active notices; None if the server does not respond."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return {path for path, value in _NOTICES.items() if _metadata(path) == value}
    return None


def _metadata(path: str) -> str:
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would answer for its own machine
    with opener.open(request, timeout=POLL_SECONDS) as response:
        return response.read().decode(errors="replace").strip()
