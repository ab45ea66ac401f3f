import socket

import psutil
import pytest

from tfdist.coordination.job_token import LOOPBACK, free_port, network_interface, route_to


def test_the_way_to_a_host_has_an_address_of_this_one():
    assert route_to(LOOPBACK) == (LOOPBACK, LOOPBACK)
    with pytest.raises(OSError):
        route_to("no-such-host.invalid")


def test_the_interface_that_has_an_address():
    held = {name: [one.address for one in some] for name, some in psutil.net_if_addrs().items()}
    [loopback] = [name for name, addresses in held.items() if LOOPBACK in addresses]
    assert network_interface(LOOPBACK) == loopback
    assert network_interface("192.0.2.1") == ""  # reserved by RFC 5737


def test_a_port_that_is_free():
    with socket.create_server(("", free_port())) as server:
        assert free_port() != server.getsockname()[1]
