"""PipeDream: the versions of weights that follow from the order of 1F1B are those of its equation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.errors import InputError
from tfdist.pipelining.schedules import check_schedule, make_schedule
from tfdist.pipelining.schedules.pipedream import pipedream, stashed_versions, weight_versions


@given(st.integers(1, 6), st.integers(1, 20))
def test_weights_are_as_old_as_the_equation_says(processes, micro_batches):
    schedule = check_schedule(pipedream(processes, micro_batches))
    for (stage, m), version in weight_versions(schedule).items():
        assert version == max(m - (processes - 1 - stage), 0)
    for (_, m), version in weight_versions(schedule, vertical_sync=True).items():
        assert version == max(m - (processes - 1), 0)


@given(st.integers(1, 6), st.integers(0, 10))
def test_the_versions_that_are_kept(processes, more):
    schedule = pipedream(processes, 2 * processes + more)
    assert stashed_versions(schedule) == tuple(processes - stage for stage in range(processes))
    assert stashed_versions(schedule, vertical_sync=True) == (processes,) * processes


def test_the_flag_does_not_offer_it():
    with pytest.raises(InputError, match="pipedream is not a known pipeline schedule"):
        make_schedule("pipedream", 2, 4)
