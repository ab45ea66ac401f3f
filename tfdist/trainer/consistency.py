"""Checks before training that ranks have the same code, versions, model and optimizer, and names what differs.

A rank with a different model would wait forever in a collective that no other rank enters or, worse, sum tensors that
do not correspond. Unless something differs, only hashes are sent.
"""

import contextlib
import functools
import hashlib
import pathlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.coordination import Group
from tfdist.coordination.timeouts import long_timeout
from tfdist.distribution.variable_creation import without_numbers
from tfdist.grammar.unique_names import unique_names
from tfdist.pipelining.staged_model import whole_model
from tfdist.reporting.environment import versions

_LONGEST = 500  # values are compared up to this number of characters
_PRIVATE = ("name", "seed", "input_layers", "output_layers")  # layer settings that Keras numbers or draws at random


def check_equal(group: Group, model: keras.Model) -> None:
    """Checks that all ranks of a group have the same versions, code and model, before any variable is sent.

    Args:
      group: the ranks that train the same model.
      model: built model; its optimizer must be built too if the model is compiled.

    Raises:
      InputError: on every rank, naming the first difference and which ranks have which value.
    """
    with long_timeout("its model") as deadline:
        group.agree("models/versions", versions(), "version of ", deadline)
        group.agree("models/code", own_code(), "the code of ", deadline, common=True)
        group.agree("models/description", described(model), "", deadline)


def check_equal_stages(group: Group, part: keras.Model) -> None:
    """Same as `check_equal`, for processes that train different stages of a model, which should have cut the same.

    Args:
      group: all ranks.
      part: the stages of this process, compiled.

    Raises:
      InputError: on every rank, naming the first difference and which ranks have which value.
    """
    check_equal(group, whole_model(part))
    with long_timeout("its model") as deadline:
        group.agree("models/optimizer", dict(_settings_of_optimizer(part.optimizer)), "", deadline)


@functools.cache
def _hash(file: str) -> str:
    """Returns the hash of a file as of the first call: later edits do not affect the code that runs."""
    return hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()[:16]


def own_code() -> dict[str, str]:
    """Returns a hash of the source file of each loaded module of the user and of tfdist, by file and module name.

    Installed packages are left out: their versions are compared instead.
    """
    found = {}
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    for name, module in sorted(sys.modules.items()):
        # `getattr` would trigger the import of a lazily loaded module.
        file = getattr(module, "__dict__", {}).get("__file__") or ""
        installed = file.startswith(libraries) or {"site-packages", "dist-packages"} & set(file.split("/"))
        if file.endswith(".py") and (name.partition(".")[0] == "tfdist" or not installed):
            with contextlib.suppress(OSError):  # the file was deleted or is in an archive
                found[f"{pathlib.Path(file).name} (module {name})"] = _hash(file)
    return found


def described(model: keras.Model) -> dict[str, str]:
    """Describes a model and its optimizer: the dtype and shape of each variable, and the plain settings of each layer.

    Names are given without the counters that Keras appends to them, which depend on what the process has created
    before.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    forms = [(f"variable {without_numbers(v.path)}", f"{v.dtype}{list(v.shape)}") for v in variables]
    layers = keras_internals.layers_of(model)
    settings = [entry for layer in layers for entry in _settings(f"layer {without_numbers(layer.name)}", layer)]
    settings += _settings_of_optimizer(optimizer) if optimizer is not None else []
    return unique_names([*forms, *settings], mark=" #")


def _settings_of_optimizer(optimizer: keras.Optimizer) -> Iterator[tuple[str, str]]:
    return _settings(f"optimizer {without_numbers(optimizer.name)}", optimizer)


def _settings(title: str, part: Any) -> Iterator[tuple[str, str]]:
    yield f"{title}: class", type(part).__name__
    config: Any = {}
    with contextlib.suppress(Exception):  # a custom layer may not implement get_config
        config = part.get_config()
    yield from _flat(f"{title}: ", {key: value for key, value in config.items() if key not in _PRIVATE})


def _flat(title: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the numbers, strings and lists of them in a nested configuration.

    Lambdas are skipped, because their serialized code contains the path of the source file.
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and value.get("class_name") == "__lambda__":
            continue
        if isinstance(value, Mapping):
            yield from _flat(f"{title}{key}.", value)
        elif all(isinstance(one, (str, int, float, type(None))) for one in _listed(value)):
            yield f"{title}{key}", str(value)[:_LONGEST]


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]
