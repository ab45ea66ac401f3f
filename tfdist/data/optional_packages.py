"""Optional packages, needed by some data sets only: the extras `examples` and `tfds`."""

import importlib
from types import ModuleType

from tfdist.errors import InputError


def extra(module: str, purpose: str, name: str = "examples") -> ModuleType:
    """Imports a module of an extra.

    Args:
      module: name of the module.
      purpose: what needs it, for the error.
      name: name of the extra.

    Raises:
      InputError: the module cannot be imported; names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{purpose} needs the Python package {module.partition('.')[0]}. Received: {error}. "
            f"Run `pip install 'tfdist[{name}]'`."
        ) from error
