"""The names on which users' programs rely. Changing these lists breaks those programs."""

import ast
import importlib
import inspect
import pathlib
import pkgutil
import types
from collections.abc import Iterator

import keras
import pytest

import tfdist
from tfdist import collectives, errors, gradients, layers, models, optimizers
from tfdist.config import strategy_registry
from tfdist.errors import ExitCode


def test_tfdist():
    assert (
        tfdist.__all__
        == """
        Checkpoints Checks Cluster Collectives EarlyStopping Group LossScaler ReduceLROnPlateau Reporting Schedule
        Strategy Trainer collectives constrain current_strategy data distribute errors find_batch_size
        find_learning_rate gather_rows gradients layers load_strategy models name_dims optimizers recompute row_semantics spawn
    """.split()
    )


@pytest.mark.parametrize("name", tfdist.__all__)
def test_every_name_can_be_had(name):
    assert getattr(tfdist, name) is not None
    assert name in dir(tfdist)


def test_type_checkers_find_every_name_where_it_is_imported_from():
    tree = ast.parse(inspect.getsource(tfdist))
    [checking] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    found = {name.name: node.module for node in checking.body for name in node.names}
    assert found == {name: tfdist._MODULES.get(name, "tfdist") for name in tfdist.__all__}


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'tfdist' has no attribute 'Trainr'"):
        _ = tfdist.Trainr


def test_strategies():
    assert {"single", "mirrored", "multiworker", "tpu", "horovod", "mesh"} <= set(strategy_registry.NAMES)


def test_parts():
    assert (
        collectives.__all__
        == """
        RecordedCall Collectives OneReplica Op RecordingCollectives NoCommunication SupportedDtypes all_gather all_reduce
        current gather_rows collectives_scope
    """.split()
    )
    assert (
        gradients.__all__
        == """
        Bucketed Clip ErrorFeedback LossScale LossScaler ReductionResult Reducer PartitionedReducer Sum accumulate_gradients
        parse_loss_scale plan unscale
    """.split()
    )
    names = "LARS NORMS_AND_BIASES MomentumCorrectedSGD WarmupAndDecay make_learning_rate"
    assert optimizers.__all__ == names.split()
    assert layers.__all__ == ["DynamicEmbedding", "MixtureOfExperts", "SyncBatchNormalization"]
    assert models.NAMES == ("mlp", "cnn", "resnet50", "transformer")


def test_errors():
    assert (
        [name for name in errors.__all__ if inspect.isclass(getattr(errors, name))]
        == """
        CheckpointError CorruptCheckpointError DesyncError ExitCode InputError Interrupted NotFiniteError
        OutOfMemoryError PeerLostError Preempted SpawnError TfdistError TrialError WriteError
    """.split()
    )


def test_the_promise_of_compatibility_names_every_public_package():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
    packages = [name for name in tfdist.__all__ if isinstance(getattr(tfdist, name), types.ModuleType)]
    assert not [name for name in (*packages, "horovod", "strategies") if f"`tfdist.{name}`" not in text]


def test_arguments_of_the_trainer():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert (
        names(tfdist.Trainer)
        == """
        model optimizer loss metrics weighted_metrics loss_weights seed jit_compile accumulate_steps loss_scale
        max_skipped_steps clip ema compression compression_min_bytes bucket_bytes bucket_order sync balance
    """.split()
    )
    assert (
        names(tfdist.Trainer.fit)
        == """
        self x y batch_size epochs verbose callbacks validation_split validation_data shuffle class_weight
        sample_weight initial_epoch steps_per_epoch validation_steps validation_batch_size validation_freq steps
        schedule checks reporting checkpoints
    """.split()
    )
    assert names(tfdist.Trainer.resume) == ["self", "path", "commits"]
    of_keras = names(keras.Model.fit)
    assert names(tfdist.Trainer.fit)[: len(of_keras)] == of_keras
    evaluated = ["self", "x", "y", "batch_size", "verbose", "sample_weight", "steps", "callbacks"]
    assert names(tfdist.Trainer.evaluate) == [*evaluated, "return_dict"]
    assert names(keras.Model.evaluate)[: len(evaluated)] == evaluated
    assert names(tfdist.Trainer.predict) == ["self", "x", "batch_size", "verbose", "steps"]
    assert names(tfdist.Trainer.save) == ["self", "path"]


def test_exit_codes():
    codes = {"DONE": 0, "FAILED": 1, "BAD_INPUT": 2, "NOT_FINITE": 3, "STALLED": 4, "PEER_LOST": 5, "OUT_OF_MEMORY": 6}
    assert {code.name: int(code) for code in ExitCode} == codes | {"PREEMPTED": 75}


def test_signatures_show_options_and_completion_shows_public_names():
    of_strategies = list(inspect.signature(tfdist.load_strategy).parameters)
    assert of_strategies[0] == "name" and {"devices", "communication", "mesh_shape", "layout"} <= {*of_strategies}
    assert "options" not in of_strategies
    assert {"compression", "precision", "devices"} <= {*inspect.signature(tfdist.distribute).parameters}
    assert [name for name in dir(tfdist) if not name.startswith("__")] == tfdist.__all__


def classes() -> Iterator[type]:
    for found in pkgutil.walk_packages(tfdist.__path__, "tfdist."):
        module = importlib.import_module(found.name)
        yield from (one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == found.name)


def overrides(one: type) -> list[str]:
    """Returns the names of what a class says to override."""
    members = {name: value.fget if isinstance(value, property) else value for name, value in vars(one).items()}
    texts = {name: inspect.getdoc(value) for name, value in members.items() if "__doc__" in dir(value)}
    return [name for name, text in texts.items() if text and text.startswith("See base class")]


@pytest.mark.tensorflow
def test_what_says_that_it_overrides_something_does():
    """A method under another name than in its base class would be called by nobody."""
    pytest.importorskip("horovod")  # all modules are imported
    found = [(one, name) for one in classes() for name in overrides(one)]
    assert len(found) > 100
    alone = [f"{one.__module__}.{one.__name__}.{name}" for one, name in found if not hasattr(super(one, one), name)]
    assert alone == []
