import pytest

from tfdist.launcher.job import Job

pytestmark = [pytest.mark.processes, pytest.mark.waits]


def test_what_can_be():
    assert Job().processes == 1
    assert (Job().restart_budget, Job().preemption_budget, Job().is_elastic) == (0, 0, False)
    elastic = Job(processes=3, min_processes=2, max_preemptions=4)
    assert (elastic.restart_budget, elastic.preemption_budget, elastic.is_elastic) == (float("inf"), 4, True)
    assert Job(processes=4, nodes=2, node_rank=1, coordinator="[::1]:12345").coordinator == "[::1]:12345"
