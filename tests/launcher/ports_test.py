import socket

import pytest

from tfdist.errors import InputError
from tfdist.launcher import ports

pytestmark = [pytest.mark.processes, pytest.mark.waits]


def test_ports_are_free_and_different():
    found = ports.free_ports(20, "127.0.0.1")
    assert len(set(found)) == 20 and set(found) <= set(ports.CANDIDATES)


def test_a_port_in_use_is_not_offered(monkeypatch):
    taken, free = ports.free_ports(2, "127.0.0.1")
    monkeypatch.setattr(ports, "CANDIDATES", [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        assert ports.free_ports(1, "127.0.0.1") == [free]
        with pytest.raises(InputError, match="Each of 2 processes needs a free port. Received: 1 on"):
            ports.free_ports(2, "127.0.0.1")
