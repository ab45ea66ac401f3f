import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.coordination.messages import BadMessage, encode
from tfdist.launcher.job_result import Outcome
from tfdist.launcher.orders import Order, OrderKind, Report, order_message, order_of, report_message, report_of

OUTCOMES = st.builds(Outcome, st.integers(0, 255), st.text(), st.none() | st.integers(0, 99))
NUMBERS = st.integers(0, 10**6)
ORDERS = st.builds(Order, st.sampled_from(OrderKind), *[NUMBERS] * 4, st.text(), st.text(), OUTCOMES, st.text())
REPORTS = st.builds(
    Report, OUTCOMES, st.booleans(), NUMBERS, st.none() | NUMBERS, st.booleans(), st.lists(NUMBERS).map(tuple)
)


@given(ORDERS, REPORTS)
def test_what_is_said_is_what_is_heard(order, report):
    assert order_of(json.loads(encode(order_message(order)))) == order
    assert report_of(json.loads(encode(report_message(report)))) == report


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": [1, 2, 3]},
        {"outcome": []},
        {"outcome": ["0", "", None]},
        {"kind": "dance"},
        {"nodes": "2"},
        {"address": None},
    ],
)
def test_what_is_no_order_is_refused(change):
    with pytest.raises(BadMessage):
        order_of(order_message(Order(OrderKind.WAIT)) | change)


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": [0]},
        {"dead": None},
        {"step": "7"},
        {"stopped": 1},
        {"final": None},
        {"absent": 1},
        {"absent": ["1"]},
    ],
)
def test_what_is_no_report_is_refused(change):
    with pytest.raises(BadMessage):
        report_of(report_message(Report(Outcome(0))) | change)
