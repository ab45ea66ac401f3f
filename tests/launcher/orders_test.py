import json

from hypothesis import given
from hypothesis import strategies as st

from tfdist.launcher.job import Outcome
from tfdist.launcher.orders import Order, OrderKind, Report, decode_order, decode_report, encode_order, encode_report

OUTCOMES = st.builds(Outcome, st.integers(0, 255), st.text(), st.none() | st.integers(0, 99))
NUMBERS = st.integers(0, 10**6)
ORDERS = st.builds(Order, st.sampled_from(OrderKind), *[NUMBERS] * 4, st.text(), OUTCOMES, st.text())
REPORTS = st.builds(
    Report, OUTCOMES, st.booleans(), NUMBERS, st.none() | NUMBERS, st.booleans(), st.lists(NUMBERS).map(tuple)
)


@given(ORDERS, REPORTS)
def test_what_is_said_is_what_is_heard(order, report):
    assert decode_order(json.loads(json.dumps(encode_order(order)))) == order
    assert decode_report(json.loads(json.dumps(encode_report(report)))) == report
