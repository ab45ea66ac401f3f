"""tfdist trains ordinary Keras 3 models on TensorFlow across devices and machines: N replicas give the result of one.

`import tfdist` does not import TensorFlow, define flags or initialize devices; the names below are imported on first use.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from tfdist.cluster import exit_status, keras_backend, quiet_tensorflow

if TYPE_CHECKING:
    from tfdist import collectives, data, errors, gradients, layers, models, optimizers, row_semantics
    from tfdist.checkpoint.manager import Checkpoints
    from tfdist.cli.distribute import distribute
    from tfdist.cluster.environment import Cluster
    from tfdist.collectives import Collectives, gather_rows
    from tfdist.coordination import Group
    from tfdist.distribution.factory import load_strategy
    from tfdist.distribution.strategy import Strategy, current_strategy
    from tfdist.distribution.variable_layouts import name_dims
    from tfdist.gradients import LossScaler
    from tfdist.launcher.spawn import spawn
    from tfdist.layers.recompute import recompute
    from tfdist.layers.sharding_constraint import constrain
    from tfdist.planning.batch_size import find_batch_size
    from tfdist.planning.learning_rate import find_learning_rate
    from tfdist.trainer.early_stopping import EarlyStopping, ReduceLROnPlateau
    from tfdist.trainer.options import Checks, Reporting, Schedule
    from tfdist.trainer.trainer import Trainer

__version__ = "0.1.0"

# Hides TensorFlow's messages; TF_CPP_MIN_LOG_LEVEL=0 shows them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
exit_status.install_exit_code_hook()
# Horovod with MPI loads UCX, which would install handlers of SIGHUP, SIGSEGV and other signals.
os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
os.environ.setdefault("UCX_HANDLE_ERRORS", "")

__all__ = [
    "Checkpoints",
    "Checks",
    "Cluster",
    "Collectives",
    "EarlyStopping",
    "Group",
    "LossScaler",
    "ReduceLROnPlateau",
    "Reporting",
    "Schedule",
    "Strategy",
    "Trainer",
    "collectives",
    "constrain",
    "current_strategy",
    "data",
    "distribute",
    "errors",
    "find_batch_size",
    "find_learning_rate",
    "gather_rows",
    "gradients",
    "layers",
    "load_strategy",
    "models",
    "name_dims",
    "optimizers",
    "recompute",
    "row_semantics",
    "spawn",
]

_NAMES = {  # by module
    "checkpoint.manager": "Checkpoints",
    "cli.distribute": "distribute",
    "cluster.environment": "Cluster",
    "collectives": "Collectives gather_rows",
    "coordination": "Group",
    "distribution.factory": "load_strategy",
    "distribution.strategy": "Strategy current_strategy",
    "distribution.variable_layouts": "name_dims",
    "gradients": "LossScaler",
    "launcher.spawn": "spawn",
    "layers.recompute": "recompute",
    "layers.sharding_constraint": "constrain",
    "planning.batch_size": "find_batch_size",
    "planning.learning_rate": "find_learning_rate",
    "trainer.early_stopping": "EarlyStopping ReduceLROnPlateau",
    "trainer.options": "Checks Reporting Schedule",
    "trainer.trainer": "Trainer",
}
_MODULES = {name: f"tfdist.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    keras_backend.check()
    with quiet_tensorflow.filter_import():
        module = importlib.import_module(_MODULES.get(name, f"tfdist.{name}"))
    value = getattr(module, name) if name in _MODULES else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the public names, for completion."""
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
