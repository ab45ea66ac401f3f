import json
import sys
import urllib.request

import pytest

from tfdist.cluster.environment import from_horovod, from_tf_config
from tfdist.errors import InputError
from tfdist.launcher.engine_environment import ENGINES
from tfdist.launcher.placement import Placement

PLACEMENT = Placement(1, ("127.0.0.1", "127.0.0.1"), ((21001,), (21002, 21003)))


def variables(name, port=7):
    return [ENGINES[name].variables(PLACEMENT, port, rank) for rank in PLACEMENT.ranks()]


def test_tf_config_says_who_a_rank_is():
    first, second = variables("tensorflow")
    assert json.loads(second["TF_CONFIG"])["task"] == {"type": "worker", "index": 2}
    cluster = from_tf_config(first)
    assert cluster and (cluster.rank, cluster.size) == (1, 3)
    assert cluster.addresses == ("127.0.0.1:21001", "127.0.0.1:21002", "127.0.0.1:21003")
    with ENGINES["tensorflow"].serve(PLACEMENT) as port:
        assert port == 0


def test_horovods_variables_say_who_a_rank_is():
    first, second = variables("horovod")
    cluster = from_horovod(second)
    assert cluster and (cluster.rank, cluster.size, cluster.local_rank, cluster.local_size) == (2, 3, 1, 2)
    assert (first["HOROVOD_CROSS_RANK"], first["HOROVOD_CROSS_SIZE"]) == ("1", "2")
    assert (second["HOROVOD_CROSS_RANK"], second["HOROVOD_CROSS_SIZE"]) == ("0", "1")
    assert first["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1" and first["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "7"
    assert first["HOROVOD_GLOO_IFACE"] == "lo" and first["HOROVOD_CONTROLLER"] == "gloo"
    assert first["HOROVOD_HOSTNAME"] == "node-1"


def test_horovods_rendezvous_is_served_and_closed():
    pytest.importorskip("horovod")
    here = Placement(0, ("127.0.0.1",), ((1, 2),))
    with ENGINES["horovod"].serve(here) as port:
        address = f"http://127.0.0.1:{port}/scope/key"
        urllib.request.urlopen(urllib.request.Request(address, b"value", method="PUT"), timeout=120).close()
        with urllib.request.urlopen(address, timeout=120) as answer:
            assert answer.read() == b"value"
    with pytest.raises(OSError):
        urllib.request.urlopen(address, timeout=120)


def test_without_horovod_the_command_that_builds_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.runner.common.util.hosts", None)
    with pytest.raises(InputError, match=r"Run `python -m tfdist.install_horovod`"):
        ENGINES["horovod"].serve(PLACEMENT).__enter__()
