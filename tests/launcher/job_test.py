import pytest

from tfdist.errors import InputError
from tfdist.launcher.job import Job

pytestmark = [pytest.mark.processes, pytest.mark.waits]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"launcher": "horovood"}, 'Received: "horovood". Did you mean "horovod"? Known: horovod, tensorflow.'),
        ({"nodes": 0}, "--nodes must be at least 1. Received: 0."),
        ({"node_rank": -1, "nodes": 2}, "--node_rank must be in [0, --nodes=2). Received: -1."),
        ({"start_timeout_seconds": 0.0}, "--start_timeout_seconds must be positive. Received: 0."),
        ({"grace_seconds": -1.0}, "--grace_seconds must not be negative. Received: -1."),
        ({"max_preemptions": -1}, "--max_preemptions must be at least 0. Received: -1."),
        ({"restart_backoff_seconds": float("nan")}, "--restart_backoff_seconds must not be negative. Received: nan."),
        ({"min_processes": 1, "nodes": 2}, "leave out --nodes and --node_rank. Received: --nodes=2, --node_rank=0."),
        ({"min_processes": 1, "coordinator": "a:1"}, "needs --hosts, which lists how many processes each may run."),
        ({"min_processes": 1, "elastic_timeout_seconds": -1.0}, "--elastic_timeout_seconds must not be negative."),
        ({"min_processes": 1, "rejoin_seconds": float("nan")}, "--rejoin_seconds must not be negative. Received: nan."),
    ],
)
def test_what_cannot_be_is_named(fields, message):
    """Other messages are in tests/cli/wrong_uses.tsv."""
    with pytest.raises(InputError) as raised:
        Job(**fields)
    assert message in str(raised.value)


def test_what_can_be():
    assert Job().processes == 1
    assert (Job().restart_budget, Job().preemption_budget, Job().is_elastic) == (0, 0, False)
    elastic = Job(processes=3, min_processes=2, max_preemptions=4)
    assert (elastic.restart_budget, elastic.preemption_budget, elastic.is_elastic) == (float("inf"), 4, True)
    assert Job(processes=4, nodes=2, node_rank=1, coordinator="[::1]:12345").coordinator == "[::1]:12345"
