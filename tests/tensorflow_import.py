"""What happens when a test first imports TensorFlow: four logical CPU devices are configured, or the import is refused.

TensorFlow takes seconds to import, and most tests of plain Python do without it. The number of logical devices is fixed when
TensorFlow is first used, so it is set immediately after the import, whoever causes it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence

LOGICAL_DEVICES = 4


def on_import(action: Callable[[types.ModuleType], None], name: str = "tensorflow") -> None:
    """Calls `action` with a module as soon as it has been imported; at once, if it has been already."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, action))


def refuse(reason: str, name: str = "tensorflow") -> None:
    """Makes every later import of a module fail.

    Raises:
      ImportError: it has been imported already.
    """

    def fail(*_: types.ModuleType) -> None:
        raise ImportError(reason)

    if name in sys.modules:
        fail()
    sys.meta_path.insert(0, _Finder(name, fail, before=fail))


def set_logical_devices(tensorflow: types.ModuleType) -> None:
    """Divides the CPU into `LOGICAL_DEVICES` logical devices."""
    config = tensorflow.config
    config.set_logical_device_configuration(
        config.list_physical_devices("CPU")[0], [config.LogicalDeviceConfiguration()] * LOGICAL_DEVICES
    )


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as without it, and calls functions before and after the module is executed."""

    def __init__(self, name: str, after: Callable[[types.ModuleType], None], before: Callable[[], None] = lambda: None):
        self._name, self._before, self._after = name, before, after

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        self._before()
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader, self._after)
        return spec


class _Loader(importlib.abc.Loader):
    """Executes a module with its loader, and calls a function; the module keeps its loader."""

    def __init__(self, loader: importlib.abc.Loader, after: Callable[[types.ModuleType], None]):
        self._loader, self._after = loader, after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._after(module)
