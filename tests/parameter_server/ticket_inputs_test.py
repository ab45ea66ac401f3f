"""Tests of the inputs of tickets, which a worker reads ahead."""

import numpy as np
import pytest

from tfdist.synchronization.server_updates import TicketInputs


def test_batches_are_read_once_and_kept_as_long_as_a_worker_may_need_them():
    found = []

    def find_ids(batch: int) -> list[np.ndarray]:
        found.append(batch)
        return [np.array([10 * batch])]

    inputs = TicketInputs(iter((number, number) for number in range(5, 12)), 5, find_ids)
    batch, _, [ids] = inputs.get(7)  # ahead of tickets 5 and 6
    assert (batch, ids) == (7, 70)
    inputs.drop_before(6, [5, 6])
    assert [inputs.get(number).batch for number in (6, 5, 7)] == [6, 5, 7] and found == [7, 6, 5]
    inputs.drop_before(8, [5])  # 7 is committed; the worker that computes 5 may be lost
    assert inputs.get(5).batch == 5 and inputs.get(8).batch == 8
    with pytest.raises(KeyError):
        inputs.get(7)
    inputs.skip_to(12)
    with pytest.raises(StopIteration):
        inputs.get(12)
