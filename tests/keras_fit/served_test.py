"""Keras's own `fit` on parameter servers: by the command that users type, and with a server in this process."""

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from tfdist.strategies.parameter_server import ParameterServer

import tfdist
from tests import processes
from tests.keras_fit.comparing import differences, plain_run
from tests.keras_fit.models import PROGRAMS, Program, run
from tests.workers import running
from tfdist.errors import InputError

SCRIPT = str(pathlib.Path(__file__).with_name("served_program.py"))


def numbers_of(command: list[str], folder: pathlib.Path) -> list[dict[str, np.ndarray]]:
    """Returns what each process of a run has saved."""
    with processes.job([*command, SCRIPT, str(folder)], 1, processes.ONE_THREAD) as job:
        [end] = job.wait(200)
    assert end.code == 0, end.output
    return [dict(np.load(path)) for path in folder.glob("*.npz")]


@pytest.mark.processes
def test_two_workers_with_a_bound_of_0_give_the_weights_and_slots_of_one_device_bit_for_bit(
    tmp_path: pathlib.Path,
) -> None:
    script = [sys.executable, "-m", "tfdist.run"]
    [expected] = numbers_of([*script, "--strategy=single"], tmp_path / "single")
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", "--servers=2", f"--log_dir={tmp_path}", "--"]
    servers = ["--strategy=parameter_server", "--staleness=bounded(0)"]
    for found in numbers_of([*launch, *script, *servers], tmp_path / "servers"):
        assert not differences(found, expected)  # of metrics, which workers have added in another order
        exact = [name for name in expected if name.startswith("exact")]
        assert len(exact) > 20 and all(found[name].tobytes() == expected[name].tobytes() for name in exact)


@pytest.mark.processes
@pytest.mark.separable
@pytest.mark.parametrize(
    ("staleness", "names"),
    [
        ("sync", ["several_inputs_and_outputs", "recurrent", "convolutional"]),
        pytest.param("ssp(0)", ["several_inputs_and_outputs"], marks=pytest.mark.full),
        pytest.param("bounded(0)", ["subclassed", "shared_layers", "recurrent"], marks=pytest.mark.full),
    ],
)
def test_two_workers_give_the_numbers_of_plain_keras(
    staleness: str, names: list[str], float64: None, tmp_path: pathlib.Path
) -> None:
    strategy = f"parameter_server(servers=0, staleness='{staleness}')"
    outcomes = running.outcomes(
        "keras_fit", strategy, 2, tmp_path, *names, seconds=400, environment=processes.ONE_THREAD
    )
    for name in names:
        expected = plain_run(name)
        assert not [found for outcome in outcomes if (found := differences(outcome[name], expected))]


@pytest.fixture
def served(served: Callable[[], ParameterServer]) -> ParameterServer:
    """A worker with a server in this process."""
    return served()


def distributed(strategy: ParameterServer, make: Callable[[], Program]) -> Program:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        program = make()
    tfdist.distribute(program.model, strategy)
    return program


@pytest.mark.parametrize("name", ["several_inputs_and_outputs", pytest.param("frozen_layers", marks=pytest.mark.full)])
def test_one_worker_gives_the_weights_of_plain_keras_bit_for_bit(
    name: str, float64: None, served: ParameterServer
) -> None:
    expected, found = plain_run(name), run(distributed(served, PROGRAMS[name]))
    assert not differences(found, expected)
    assert [w.tobytes() for w in found["weights"]] == [w.tobytes() for w in expected["weights"]]


def small() -> Program:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    return Program(model, np.ones([12, 4]), np.ones([12, 2]))


def trained(strategy: ParameterServer, make: Callable[[], Program] = small) -> keras.Model:
    program = distributed(strategy, make)
    program.model.fit(program.x, program.y, batch_size=4, verbose=0)
    return program.model


def test_a_loss_scale_optimizer_is_that_of_plain_keras(
    served: ParameterServer, mixed_float16: None, tmp_path: pathlib.Path
) -> None:
    model = trained(served)
    keras.utils.set_random_seed(1)
    plain = small()
    plain.model.fit(plain.x, plain.y, batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    for found, expected in zip(loaded.optimizer.variables, plain.model.optimizer.variables, strict=True):
        assert "step_counter" in expected.path or found.numpy().tobytes() == expected.numpy().tobytes(), expected.path
    assert [w.tobytes() for w in model.get_weights()] == [w.tobytes() for w in plain.model.get_weights()]


def test_a_compilation_with_the_same_optimizer_keeps_its_state(float64: None, served: ParameterServer) -> None:
    model, plain = trained(served), small().model
    keras.utils.set_random_seed(1)
    plain.set_weights([np.zeros_like(w) for w in plain.get_weights()])
    model.set_weights(plain.get_weights())
    plain.optimizer.build(plain.trainable_variables)
    for variable, value in zip(plain.optimizer.variables, model.optimizer.variables, strict=True):
        variable.assign(value.numpy())
    for each in (model, plain):
        each.compile(each.optimizer, "mae", jit_compile=False)
        each.fit(np.ones([12, 4]), np.ones([12, 2]), batch_size=4, verbose=0)
    pairs = zip(model.optimizer.variables, plain.optimizer.variables, strict=True)
    assert all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in pairs)
    assert [w.tobytes() for w in model.get_weights()] == [w.tobytes() for w in plain.get_weights()]


def save_the_first_of_two(strategy: ParameterServer) -> None:
    first = trained(strategy)
    trained(strategy)
    first.optimizer.variables[-1].numpy()


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of the program, which the server does not run."""

    def __call__(self, step: Any) -> Any:
        return 0.1 / (1 + keras.ops.cast(step, "float32"))

    def get_config(self) -> dict[str, Any]:
        return {}


def warming_up() -> Program:
    program = small()
    program.model.compile(keras.optimizers.SGD(Warmup()), "mse")
    return program


REFUSED = {
    "a custom train step": (
        lambda strategy: trained(strategy, PROGRAMS["custom_train_step"]),
        "Parameter servers need Keras's own train_step.*Received: own_step: train_step",
    ),
    "an optimizer of the program": (
        lambda strategy: trained(strategy, PROGRAMS["functional"]),
        "must be classes of Keras or tfdist. Received: Could not locate class 'Damped'[.] Use",
    ),
    "a schedule of the program": (
        lambda strategy: trained(strategy, warming_up),
        "Received: Could not locate class 'Warmup'[.] Use",
    ),
    "the state of a model that servers no longer hold": (save_the_first_of_two, "hold one model at a time"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_servers_do_not_support_is_refused(name: str, served: ParameterServer) -> None:
    use, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        use(served)


def test_steps_are_compiled(served: ParameterServer) -> None:
    program = distributed(served, small)
    program.model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(InputError, match="On parameter servers, every step is compiled. Received: run_eagerly=True"):
        program.model.fit(program.x, program.y, verbose=0)
