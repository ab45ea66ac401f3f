"""Multiworker with an engine that does not start; tests/end_to_end/exit_codes_test.py has real processes."""

import pytest
import tensorflow as tf
from tfdist.strategies import multiworker

from tfdist.cluster.environment import Cluster
from tfdist.coordination import LocalGroup
from tfdist.coordination.group import LostMember
from tfdist.distribution import tf_server
from tfdist.errors import PeerLostError


class Losing(LocalGroup):
    """A group that reports a given loss."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def lost(self, wait=0.0):
        return self.loss


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (LostMember(1, "its connection closed"), "rank 1 is lost: its connection closed."),
        (None, "Not every rank's TensorFlow server was up within 7.5 s."),
    ],
)
def test_servers_that_are_late(monkeypatch, loss, message):
    limits = []

    def late(resolver, options):
        raise tf.errors.DeadlineExceededError(None, None, "Barrier timed out.")

    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", late)
    monkeypatch.setattr(multiworker, "share_cores", lambda *_: None)
    monkeypatch.setattr(tf_server.keras_internals, "limit_start_of_workers", lambda *given: limits.append(given))
    with pytest.raises(PeerLostError) as caught:
        multiworker.MultiWorker(cluster=Cluster(), join=lambda _: Losing(loss), start_timeout_seconds=7.5)
    assert str(caught.value) == message
    assert limits == [(1, 7.5)]
