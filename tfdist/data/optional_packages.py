"""Optional packages, needed by some data sets only: the `examples` extra."""

import importlib
from types import ModuleType

from tfdist.errors import InputError


def extra(module: str, purpose: str) -> ModuleType:
    """Imports a module of the `examples` extra.

    Args:
      module: name of the module.
      purpose: what needs it, for the error.

    Raises:
      InputError: the module cannot be imported; names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{purpose} needs the Python package {module.partition('.')[0]}. Received: {error}. "
            "Run `pip install 'tfdist[examples]'`."
        ) from error
