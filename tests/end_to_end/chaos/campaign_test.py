"""The table of results, and what counts as a difference."""

import numpy as np

from tests.end_to_end.chaos.campaign import Outcome, table
from tests.end_to_end.chaos.ending import Ending, differences
from tests.end_to_end.chaos.plan import MISSED, START, STEP, WRITE


def test_the_table_has_each_strategy_and_all() -> None:
    good = Outcome([STEP, WRITE], [1.0, 2.5], 2, [], 20.0)
    bad = Outcome([START, MISSED], [0.5], 1, ["tensor model/hidden/kernel"], 40.0)
    assert table([("one", good), ("other", bad)]).splitlines() == [
        "| strategy | seeds | blows | start | step | write | end | slowest end | a seed takes | differences |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| one | 1 | 2 | 0% | 50% | 50% | 0% | 2.5 s | 20 s | 0 |",
        "| other | 1 | 1 | 100% | 0% | 0% | 0% | 0.5 s | 40 s | 1 |",
        "| all | 2 | 3 | 33% | 33% | 33% | 0% | 2.5 s | 30 s | 1 |",
    ]


def test_whatever_is_not_the_same_is_named() -> None:
    one = Ending({"model/a": "0f", "optimizer/a": "1e"}, {"begun_at": 0}, [{"kind": "train", "loss": 0.5}], "")
    assert not differences(one, one)
    loss = float(np.nextafter(0.5, 1))
    other = Ending({"model/a": "00"}, {"begun_at": 7}, [{"kind": "train", "loss": loss}], "Not proved: 1 problems")
    found = differences(other, one)
    assert [text.partition(":")[0] for text in (found[0], found[1], found[2], found[4])] == [
        "tensor model/a",
        "tensor optimizer/a",
        "value begun_at",
        "Not proved",
    ]
    assert found[3].startswith("record") and str(loss) in found[3]
    assert differences(one._replace(records=[]), one) == ["0 records, not 1"]
