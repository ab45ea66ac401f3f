"""tfdist trains ordinary Keras 3 models on TensorFlow across devices and machines: N replicas give the result of one.

Importing it imports no TensorFlow, defines no flag and touches no device; the names below are loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist import collectives, data, gradients, layers, models, optimizers
    from tfdist.cluster import Cluster
    from tfdist.collectives import Collectives, gather_rows
    from tfdist.constraining import constrain
    from tfdist.dims import name_dims
    from tfdist.distributing import distribute
    from tfdist.gradients import LossScaler
    from tfdist.group import Group
    from tfdist.loading import load_strategy
    from tfdist.recomputing import recompute
    from tfdist.spawning import spawn
    from tfdist.strategy import Strategy, current_strategy
    from tfdist.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "Cluster",
    "Collectives",
    "Group",
    "LossScaler",
    "Strategy",
    "Trainer",
    "collectives",
    "constrain",
    "current_strategy",
    "data",
    "distribute",
    "gather_rows",
    "gradients",
    "layers",
    "load_strategy",
    "models",
    "name_dims",
    "optimizers",
    "recompute",
    "spawn",
]

_HOMES = {
    "Checkpoints": "tfdist.saving",
    "Cluster": "tfdist.cluster",
    "Collectives": "tfdist.collectives",
    "Group": "tfdist.group",
    "LossScaler": "tfdist.gradients",
    "Strategy": "tfdist.strategy",
    "Trainer": "tfdist.trainer",
    "constrain": "tfdist.constraining",
    "current_strategy": "tfdist.strategy",
    "distribute": "tfdist.distributing",
    "gather_rows": "tfdist.collectives",
    "load_strategy": "tfdist.loading",
    "name_dims": "tfdist.dims",
    "recompute": "tfdist.recomputing",
    "spawn": "tfdist.spawning",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        value = importlib.import_module(f"tfdist.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
