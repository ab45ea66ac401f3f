"""Settings of all tests, the choice of those that run, and the strategies that tests share.

Nothing here imports TensorFlow: tests of plain Python start within a second.
"""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# `auto` depends on the number of cores, on which the tests must not depend.
os.environ["TFDIST_COMMUNICATION"] = "gloo"

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import tensorflow_import
from tests.waiting import DEADLINE, Clock

if TYPE_CHECKING:
    from tfdist.distribution.strategy import Strategy

pytest_plugins = ["tests.tiers"]

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

tensorflow_import.on_import(tensorflow_import.set_logical_devices)


def pytest_sessionstart() -> None:
    """Stops garbage collection, which takes a quarter of the time of collecting the tests and finds hardly anything."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Resumes garbage collection, without what importing the tests has made."""
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exempts what a module leaves behind from later collections: TensorFlow keeps every graph that has a condition in it."""
    if nextitem and nextitem.path != item.path and "tensorflow" in sys.modules:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _warnings_forgotten() -> None:
    """Lets each test see the warnings that are logged once per process."""
    if module := sys.modules.get("tfdist.reporting.warn_once"):
        module.logged_situations.clear()


@pytest.fixture(scope="session")
def single() -> "Strategy":
    """A strategy with one replica."""
    return _strategy("single")


@pytest.fixture(scope="session")
def mirrored2() -> "Strategy":
    """A strategy with two replicas in this process."""
    return _strategy("mirrored", devices=2)


@pytest.fixture(scope="session")
def mirrored4() -> "Strategy":
    """A strategy with four replicas in this process."""
    return _strategy("mirrored", devices=4)


@pytest.fixture(scope="session")
def mesh2x2() -> "Strategy":
    """A mesh of four devices: the batch is sharded over two pairs, heads and widths over the devices of each pair."""
    return _mesh("2x2")


@pytest.fixture(scope="session")
def mesh1x4() -> "Strategy":
    """A mesh of four devices along the model axis."""
    return _mesh("1x4")


@pytest.fixture(scope="session")
def mesh4x1() -> "Strategy":
    """A mesh of four devices along the batch axis."""
    return _mesh("4x1")


@pytest.fixture
def served() -> Iterator[Callable[..., "Strategy"]]:
    """Returns a function that starts the strategy parameter_server with a server in this process."""
    from tfdist.strategies.parameter_server import ParameterServer

    from tfdist.cluster.environment import Cluster
    from tfdist.coordination import LocalGroup

    started = []

    def start(staleness: str = "async", **options: int) -> "Strategy":
        options |= {"cluster": Cluster(), "join": lambda _: LocalGroup(), "servers": 0}
        started.append(ParameterServer(staleness=staleness, **options))
        return started[-1]

    yield start
    for strategy in started:
        strategy.close()


@pytest.fixture
def warned_once(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns a function that returns the warnings that are logged once per process."""
    caplog.set_level("WARNING")
    name = "tfdist.reporting.warn_once"
    return lambda: [record.getMessage() for record in caplog.records if record.name == name]


@pytest.fixture
def clock() -> Clock:
    """A clock that stands still until its time is set."""
    return Clock()


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Asserts that every thread that a test has started ends soon after it."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE)
    assert set(threading.enumerate()) <= before


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    """Sets Keras's global precision, which is float32 again after the test."""
    import keras

    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def mixed_float16(monkeypatch: pytest.MonkeyPatch, precision: Callable[[str], None]) -> None:
    """Clearing a session sets this policy, and not float32."""
    import keras

    monkeypatch.setattr(keras.utils, "clear_session", lambda **_: precision("mixed_float16"))


@pytest.fixture
def float64(precision: Callable[[str], None]) -> Iterator[None]:
    """Computes everything in float64, where rounding errors and bugs are far apart."""
    import keras

    keras.config.set_floatx("float64")
    precision("float64")
    yield
    keras.config.set_floatx("float32")


def _strategy(name: str, **options: object) -> "Strategy":
    import tfdist

    return tfdist.load_strategy(name, **options, environment={})


def _mesh(name: str) -> "Strategy":
    from tfdist import testing

    shape, layout = testing.MESHES[name]
    return _strategy("mesh", mesh_shape=shape, layout=layout)
