"""Multiworker with an engine that does not start; tests/end_to_end/exit_codes_test.py has real processes."""

import socket

import pytest
import tensorflow as tf
from tfdist.strategies import mesh, multiworker

from tfdist.cluster.environment import Cluster
from tfdist.coordination import LocalGroup
from tfdist.coordination.group import LostMember
from tfdist.distribution import tf_server
from tfdist.errors import InputError, PeerLostError


class Losing(LocalGroup):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def first_loss(self, wait=0.0):
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


@pytest.mark.parametrize("kind", [multiworker.MultiWorker, mesh.MeshOfDevices])
def test_a_port_in_use_is_bad_input(kind, monkeypatch):
    monkeypatch.setattr(f"{kind.__module__}.share_cores", lambda *_: None)
    with socket.create_server(("", 0)) as held, pytest.raises(InputError, match="End the program that uses it"):
        cluster = Cluster(1, 2, 1, 2, addresses=("localhost:1", f"localhost:{held.getsockname()[1]}"))
        kind(cluster=cluster, join=lambda _: LocalGroup())
