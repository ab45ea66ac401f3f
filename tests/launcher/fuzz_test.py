"""Arbitrary bytes and reports for the rendezvous of launchers: `make fuzz` sends many, `make test` a few."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.arbitrary import near
from tests.coordination.fuzz_test import errors_logged, send
from tests.launcher.rendezvous_server_test import HELLO, Open
from tfdist.coordination.messages import encode
from tfdist.launcher import orders
from tfdist.launcher.job import Outcome
from tfdist.launcher.orders import Report

pytestmark = [pytest.mark.processes, pytest.mark.waits, pytest.mark.fuzz]

REPORT = orders.encode_report(Report(Outcome(0)))
RAW = st.binary(max_size=300) | st.tuples(near(HELLO).map(encode), st.binary(max_size=100)).map(b"".join)
fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def opened() -> Iterator[Open]:
    made = Open()
    with errors_logged() as errors, made.rendezvous_server:
        yield made
        made.finish()
    assert not errors


@fuzzed
@given(raw=RAW)
def test_bytes_of_an_untrusted_client(opened: Open, raw: bytes) -> None:
    send(opened.address, raw)
    assert opened.said == []
