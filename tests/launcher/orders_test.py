import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.coordination.messages import BadMessage, encode
from tfdist.launcher.job import Outcome
from tfdist.launcher.orders import Order, OrderKind, Report, decode_order, decode_report, encode_order, encode_report

OUTCOMES = st.builds(Outcome, st.integers(0, 255), st.text(), st.none() | st.integers(0, 99))
NUMBERS = st.integers(0, 10**6)
ORDERS = st.builds(Order, st.sampled_from(OrderKind), *[NUMBERS] * 4, st.text(), st.text(), OUTCOMES, st.text())
REPORTS = st.builds(
    Report, OUTCOMES, st.booleans(), NUMBERS, st.none() | NUMBERS, st.booleans(), st.lists(NUMBERS).map(tuple)
)


@given(ORDERS, REPORTS)
def test_what_is_said_is_what_is_heard(order, report):
    assert decode_order(json.loads(encode(encode_order(order)))) == order
    assert decode_report(json.loads(encode(encode_report(report)))) == report


# As they arrive: with lists instead of tuples.
ORDER = json.loads(encode(encode_order(Order(OrderKind.WAIT))))
REPORT = json.loads(encode(encode_report(Report(Outcome(0)))))


@pytest.mark.parametrize(
    "of, message, field, values",
    [
        (decode_order, ORDER, "outcome", ([1, 2, 3], [], ["0", "", None])),
        (decode_order, ORDER, "kind", ("dance",)),
        (decode_order, ORDER, "nodes", ("2",)),
        (decode_order, ORDER, "address", (None,)),
        (decode_report, REPORT, "outcome", ([0],)),
        (decode_report, REPORT, "dead", (None,)),
        (decode_report, REPORT, "step", ("7",)),
        (decode_report, REPORT, "stopped", (1,)),
        (decode_report, REPORT, "final", (None,)),
        (decode_report, REPORT, "absent", (1, ["1"])),
    ],
)
def test_what_is_no_order_or_report_is_refused(of, message, field, values):
    assert of(message)
    for value in values:
        with pytest.raises(BadMessage):
            of(message | {field: value})
