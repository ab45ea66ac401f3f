"""Steps without a flush in two processes: what a step that is not finite leaves, what is sent, and evaluations in between."""

import functools
import tempfile
from typing import Any

import numpy as np
import pytest

from tests.workers import running
from tests.workers.delayed_loop import BATCH, FEATURES, PER_CALL, STEPS

pytestmark = pytest.mark.processes

BAD = 2  # the step whose batch has the row
LEFT = "Without a flush, other stages are updated before this is known: the weights are those of"


@functools.cache
def found() -> list[dict[str, dict[str, Any]]]:
    """Returns what each process has after each training."""
    with tempfile.TemporaryDirectory() as directory:
        strategy = "pipeline(pipeline_schedule='pipedream', micro_batches=2)"
        return running.outcomes("delayed_loop", strategy, 2, directory, seconds=300)


def check_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


@pytest.mark.parametrize(("place", "failed"), [("first", 0), ("last", 1)])
def test_a_stage_that_is_not_finite_is_named_with_what_others_did(place: str, failed: int) -> None:
    """Gradients of one stage only are not finite: it was not updated, and the other one was until the end of the call."""
    for rank, outcomes in enumerate(found()):
        message, variables = outcomes[place]["message"], outcomes[place]["variables"]
        said = f"The loss or the gradients of stage {failed} are not finite. {LEFT} stage {failed} before step {BAD}, "
        assert said in message
        assert f"those of stage {1 - failed} before step {PER_CALL}. Resume from a checkpoint." in message
        assert ("root/scale" in message) is (rank == failed)
        [updates] = [int(value) for path, value in variables.items() if path.endswith("iteration")]
        assert updates == (BAD if rank == failed else PER_CALL)
    stopped, wanted = (found()[failed][name] for name in (place, f"{place}, before"))
    check_equal(stopped["variables"], wanted["variables"])


def test_a_step_that_is_not_finite_in_all_stages_leaves_what_was_before_it() -> None:
    for outcomes in found():
        stopped, wanted = outcomes["all"], outcomes["all, before"]
        assert stopped["step"] == BAD and "The weights are those before that step." in stopped["message"]
        check_equal(stopped["variables"], wanted["variables"])
        check_equal(stopped["versions"], wanted["versions"])
    assert found()[0]["all"]["versions"] and not found()[1]["all"]["versions"]


def test_evaluations_in_a_callback_do_not_affect_the_result() -> None:
    for outcomes in found():
        plain, observed = outcomes["plain"], outcomes["observed"]
        check_equal(observed["variables"], plain["variables"])
        check_equal(observed["versions"], plain["versions"])
        assert observed["losses"] == plain["losses"]
        assert len(set(observed["evaluations"])) == STEPS // PER_CALL


def test_records_have_the_bytes_of_messages() -> None:
    """Activations go to the last stage, and their gradients back; with one replica, no gradients of weights are sent."""
    for outcomes in found():
        assert {*outcomes["plain"]["sent"]} == {(8 * BATCH * FEATURES,) * 2}
