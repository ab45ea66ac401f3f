"""`mpi_ops` and `util`: modules of Horovod's that scripts take functions from, under the same names."""

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.horovod import moves, objects, ops, process, process_sets, reductions, waiting
from tfdist.horovod.errors import UnknownNameError


def executing_eagerly() -> bool:
    """Whether calls run eagerly."""
    return tf.executing_eagerly()


def vars_to_refs(vars: Any) -> Any:
    """References, which can be hashed, of a variable or of those in nested lists."""
    return tuple(vars_to_refs(one) for one in vars) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables of references that `vars_to_refs` has made."""
    return [refs_to_vars(one) for one in refs] if isinstance(refs, tuple) else refs.deref()


class HorovodModule(types.ModuleType):
    """A module of this package with names of one of Horovod's; what it has beside them is Horovod's own."""

    def __init__(self, name: str, names: Mapping[str, Any]):
        """Args: name: in this package; names: what it has."""
        super().__init__(f"tfdist.horovod.{name}", f"The names of Horovod's module `{name}`.")
        self._theirs = f"horovod.tensorflow.{name}"
        self.__dict__.update(names)
        sys.modules[self.__name__] = self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and process.horovod_is_installed():
            module = importlib.import_module(self._theirs)
            if hasattr(module, name):
                return getattr(module, name)
        raise UnknownNameError(f"{self.__name__} has no {name}. Received: {name}. Use the names of tfdist.horovod.")


def _of(*modules: types.ModuleType) -> dict[str, Any]:
    """The public functions and classes that modules define, and Horovod's operations and sets."""
    names = {name: value for module in modules for name, value in vars(module).items() if not name.startswith("_")}
    return {
        name: value for name, value in names.items() if getattr(value, "__module__", "").startswith("tfdist.horovod")
    }


mpi_ops = HorovodModule("mpi_ops", _of(moves, objects, ops, process, process_sets, reductions, waiting))
util = HorovodModule(
    "util", {"_executing_eagerly": executing_eagerly, "vars_to_refs": vars_to_refs, "refs_to_vars": refs_to_vars}
)
