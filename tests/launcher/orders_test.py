import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.coordination.messages import BadMessage, encode
from tfdist.launcher.job import Outcome
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


# As they arrive: with lists instead of tuples.
ORDER = json.loads(encode(order_message(Order(OrderKind.WAIT))))
REPORT = json.loads(encode(report_message(Report(Outcome(0)))))


@pytest.mark.parametrize(
    "of, message, field, values",
    [
        (order_of, ORDER, "outcome", ([1, 2, 3], [], ["0", "", None])),
        (order_of, ORDER, "kind", ("dance",)),
        (order_of, ORDER, "nodes", ("2",)),
        (order_of, ORDER, "address", (None,)),
        (report_of, REPORT, "outcome", ([0],)),
        (report_of, REPORT, "dead", (None,)),
        (report_of, REPORT, "step", ("7",)),
        (report_of, REPORT, "stopped", (1,)),
        (report_of, REPORT, "final", (None,)),
        (report_of, REPORT, "absent", (1, ["1"])),
    ],
)
def test_what_is_no_order_or_report_is_refused(of, message, field, values):
    assert of(message)
    for value in values:
        with pytest.raises(BadMessage):
            of(message | {field: value})
