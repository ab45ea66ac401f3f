"""Four logical CPU devices for the test process, and the strategies that tests share."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# `auto` depends on the number of cores, on which the tests must not depend.
os.environ["TFDIST_COMMUNICATION"] = "gloo"

import pathlib
import signal
import threading
from collections.abc import Iterator

import keras
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, settings

import tfdist
from tests import slicing
from tests.waiting import DEADLINE
from tfdist.distribution.strategy import Strategy
from tfdist.reporting import warn_once
from tfdist.testing import parity

# A shell ignores SIGINT in what it starts in the background, and nohup SIGHUP; so would every process that a test starts.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# The same examples in every run, without deadlines: results depend neither on chance nor on the speed of the machine.
_SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much)
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile(
    "fuzz", deadline=None, max_examples=int(os.environ.get("FUZZ_EXAMPLES", 20_000)), suppress_health_check=_SLOW
)
settings.load_profile("tests")

# Their number is fixed when TensorFlow is first used, so it is set before any test runs.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)

# Where the longest tests are. They run first, so that no worker is left with one of them when the others have nothing to do.
_FIRST = [
    pathlib.Path(__file__).parent / folder
    for folder in ("end_to_end/elastic", "end_to_end/chaos", "programs", "conformance", "keras_fit", "horovod")
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Defines --slice."""
    parser.addoption(
        "--slice", help="N/M: the N-th of M parts of the tests, which together are all; see tests/slicing.py."
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Selects the tests of --slice from those of -m; otherwise, begins with the longest."""
    if config.getoption("--slice") is None:
        yield
        items.sort(
            key=lambda item: next((n for n, one in enumerate(_FIRST) if item.path.is_relative_to(one)), len(_FIRST))
        )
        return
    number, parts = map(int, config.getoption("--slice").split("/"))
    if not 1 <= number <= parts:
        raise pytest.UsageError(f"--slice=N/M must have N from 1 to M. Received: {number}/{parts}.")
    for item in items:  # before xdist reads the groups of --dist=loadgroup
        if not slicing.is_separable(item):
            item.add_marker(pytest.mark.xdist_group(slicing.unit_of(item)))
    yield
    selected = slicing.select(items, number, parts)
    config.hook.pytest_deselected(items=[item for item in items if item not in {*selected}])
    items[:] = selected


@pytest.fixture(autouse=True)
def _warnings_forgotten() -> None:
    """Lets each test see the warnings that are logged once per process."""
    warn_once.forget()


@pytest.fixture(scope="session")
def single() -> Strategy:
    """A strategy with one replica."""
    return tfdist.load_strategy("single", environment={})


@pytest.fixture(scope="session")
def mirrored2() -> Strategy:
    """A strategy with two replicas in this process."""
    return tfdist.load_strategy("mirrored", devices=2, environment={})


@pytest.fixture(scope="session")
def mirrored4() -> Strategy:
    """A strategy with four replicas in this process."""
    return tfdist.load_strategy("mirrored", devices=4, environment={})


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """Exempts what a module leaves behind from later collections: TensorFlow keeps every graph that has a condition in it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Asserts that every thread that a test has started ends soon after it."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE)
    assert set(threading.enumerate()) <= before


@pytest.fixture
def float64() -> Iterator[None]:
    """Computes everything in float64, where rounding errors and bugs are far apart."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="session")
def mesh2x2() -> Strategy:
    """A mesh of four devices: the batch is sharded over two pairs, heads and widths over the devices of each pair."""
    return _mesh("2x2")


@pytest.fixture(scope="session")
def mesh1x4() -> Strategy:
    """A mesh of four devices along the model axis."""
    return _mesh("1x4")


@pytest.fixture(scope="session")
def mesh4x1() -> Strategy:
    """A mesh of four devices along the batch axis."""
    return _mesh("4x1")


def _mesh(name: str) -> Strategy:
    shape, layout = parity.MESHES[name]
    return tfdist.load_strategy("mesh", mesh_shape=shape, layout=layout, environment={})
