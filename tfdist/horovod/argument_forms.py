"""Functions of both `horovod.tensorflow` and `horovod.tensorflow.keras`, with different arguments or orders."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])
_RENAMED = {"value": "tensor"}


def also_called(order: Sequence[str], when: Callable[..., bool] | None = None) -> Callable[[_Function], _Function]:
    """Decorates a function so that it can also be called in its other form.

    Args:
      order: names of the other form's arguments, by position; `value` stands for `tensor`.
      when: whether positional arguments are in the other form; None if both forms have the same order.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= len(order) and when is not None and when(*args):
                named = dict(zip(order, args, strict=False))
                for name in named.keys() & kwargs.keys():
                    raise TypeError(f"{function.__name__}() got multiple values for argument {name!r}")
                args, kwargs = (), named | kwargs
            if "value" in kwargs and args:
                raise TypeError(f"{function.__name__}() got multiple values for argument 'value'")
            return function(*args, **{_RENAMED.get(name, name): value for name, value in kwargs.items()})

        return cast(_Function, called)

    return decorate


def names_a_device(text: str) -> bool:
    """Returns whether a text is a device, such as "", "/cpu:0" or "GPU:1", rather than the name of a call."""
    return text == "" or text.startswith("/") or text.partition(":")[0].lower() in ("cpu", "gpu")
