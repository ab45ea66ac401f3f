import json

from hypothesis import given
from hypothesis import strategies as st

from tfdist.launcher.job import Outcome
from tfdist.launcher.orders import Order, OrderKind, Report, decode, encode

OUTCOMES = st.builds(Outcome, st.integers(0, 255), st.text(), st.none() | st.integers(0, 99))
NUMBERS = st.integers(0, 10**6)
ORDERS = st.builds(Order, st.sampled_from(OrderKind), *[NUMBERS] * 4, st.text(), OUTCOMES, st.text())
REPORTS = st.builds(Report, OUTCOMES, st.booleans(), NUMBERS, st.none() | NUMBERS, st.booleans(), st.lists(NUMBERS))


@given(ORDERS | REPORTS)
def test_what_is_said_is_what_is_heard(message):
    assert decode(type(message), json.loads(json.dumps(encode(message)))) == message
