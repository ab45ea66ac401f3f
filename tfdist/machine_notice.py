"""Hearing from the platform that this machine will be taken away, before it sends a signal: Google Compute Engine's notices."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist import keras_internals

ASK_SECONDS = 5.0  # a machine that can be preempted has 30 s from its notice
_NOTICES = {"instance/preempted": "TRUE", "instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
_PRODUCT = Path("/sys/class/dmi/id/product_name")

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def machine_notices(on_notice: Callable[[str], object]) -> Iterator[None]:
    """Around a training: where the platform gives notice, it is asked every few seconds; elsewhere this does nothing.

    What TensorFlow's failure handling asks is asked: the metadata server of Google Compute Engine, or one at
    GCE_METADATA_IP. A notice that stands when the training begins has stopped one before, and counts no more: a
    maintenance may be announced an hour ahead.

    Args:
      on_notice: called once, from another thread, with the notice's name; to return soon.
    """
    if not _gives_notice():
        yield
        return
    ended = threading.Event()
    # Not joined: it may wait for an answer.
    threading.Thread(target=_watch, args=(on_notice, ended), name="tfdist-machine-notice", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _gives_notice() -> bool:
    if "GCE_METADATA_IP" in os.environ:
        return True
    try:
        return "Google Compute Engine" in _PRODUCT.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False


def _watch(on_notice: Callable[[str], object], ended: threading.Event) -> None:
    stood = _standing()
    while not ended.wait(ASK_SECONDS):
        news = _standing() - stood
        if news and not ended.is_set():
            name = min(news)
            _log.warning("The platform takes this machine away (%s): stops at the next agreed step and saves.", name)
            on_notice(name)
            return


def _standing() -> set[str]:
    """The notices that are given now; a server that does not answer gives none."""
    with contextlib.suppress(OSError):
        return {path for path, word in _NOTICES.items() if keras_internals.compute_metadata(path).strip() == word}
    return set()
