"""Code that runs around the first import of a module, by whatever module it is imported."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Context = Callable[[], contextlib.AbstractContextManager[None]]


def around_import(name: str, context: Context) -> None:
    """Enters a context while a module is executed, unless it has been imported already."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name, context))


class _Finder:
    """Finds a module until it is imported, with a loader that enters the context."""

    def __init__(self, name: str, context: Context):
        self._name, self._context, self._is_searching = name, context, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec and spec.loader:
            # It has the methods that are called.
            spec.loader = _Loader(spec.loader, self, self._context)  # type: ignore[assignment]
        return spec


class _Loader:
    """Loads a module with another loader, in a context."""

    def __init__(self, loader: Any, finder: _Finder, context: Context):
        self._loader, self._finder, self._context = loader, finder, context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        with self._context():
            module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self._finder)
            self._loader.exec_module(module)
