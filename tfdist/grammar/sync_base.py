"""Base classes of the methods of `--sync`, and checks of their parameters. Does not import TensorFlow."""

import dataclasses
import itertools
from typing import ClassVar

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer, is_number
from tfdist.grammar.spec import parse

STATES = ("local", "averaged", "reset")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """How replicas are synchronized; the fields of subclasses are the parameters in the flag.

    Attributes:
      name: name of the method in the flag.
      exchanges_weights: whether each replica updates weights of its own between exchanges.
      has_center: whether replicas keep weights of their own even during an exchange, so that a center is evaluated.
      trains_clients: whether a step is a round, in which clients train one after the other on the replicas.
      guide: the page that explains the parameters.
    """

    name: ClassVar[str]
    exchanges_weights: ClassVar[bool] = True
    has_center: ClassVar[bool] = False
    trains_clients: ClassVar[bool] = False
    guide: ClassVar[str] = "docs/guides/local_sgd.md"

    def examples_per_step(self, size: int, batch_size: int) -> int:
        """Returns the number of examples that count as one step, of data of `size` examples."""
        return batch_size

    @property
    def acts_on_one_replica(self) -> bool:
        """Whether an exchange changes the weights or the optimizer's state of a single replica, too."""
        return self.has_center or self.trains_clients

    def groups(self, replicas: int) -> list[tuple[int, ...]]:
        """Returns the ranks of each group that communicates, besides all replicas."""
        return []

    def __str__(self) -> str:
        """Returns a text that `parse_sync` converts to an equal value."""
        fields = [field for field in dataclasses.fields(self) if field.init]
        given = {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{self.name}({arguments})" if given else self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryStep(Sync):
    """Gradients are summed over replicas in every step."""

    name: ClassVar[str] = "every_step"
    exchanges_weights: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Periodic(Sync):
    """Replicas train locally, and exchange weights every `period` steps.

    Attributes:
      period: number of steps between exchanges, at least 1.
    """

    period: int = 8

    def __post_init__(self) -> None:
        """Validates the parameters."""
        check_integer(self, "period", 1, "steps")

    @property
    def first_local_step(self) -> int:
        """The step from which on replicas train locally."""
        return 0

    @property
    def outer(self) -> str:
        """The optimizer of the global weights, whose gradient is the mean of what replicas have changed; "" for none."""
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaging(Periodic):
    """After an exchange, replicas continue from global weights, which are computed from the mean of their own.

    Attributes:
      state: what happens to the optimizer's state in an exchange: "local" leaves each replica its own, "averaged"
        replaces it by its mean, "reset" by its initial value.
    """

    state: str = "local"

    def __post_init__(self) -> None:
        """Validates the parameters."""
        super().__post_init__()
        check_choice(self, "state", STATES)

    @property
    def acts_on_one_replica(self) -> bool:
        """See base class."""
        return bool(self.outer) or self.state == "reset"


def check_integer(sync: Sync, parameter: str, least: int, unit: str) -> None:
    """Raises `InputError` unless a parameter is an integer of at least `least`."""
    value = getattr(sync, parameter)
    if not is_integer(value) or value < least:
        raise invalid_parameter(sync, f"{parameter} must be a number of {unit} of at least {least}, not {value!r}")


def check_fraction(sync: Sync, parameter: str) -> None:
    """Raises `InputError` unless a parameter is a number above 0 and below 1."""
    value = getattr(sync, parameter)
    if not is_number(value) or not 0 < value < 1:
        raise invalid_parameter(sync, f"{parameter} must be a number above 0 and below 1, not {value!r}")


def check_choice(sync: Sync, parameter: str, choices: tuple[str, ...]) -> None:
    """Raises `InputError` unless a parameter is one of several words."""
    value = getattr(sync, parameter)
    if value not in choices:
        raise invalid_parameter(sync, f"{parameter} must be one of {', '.join(choices)}, not {value!r}")


def check_outer(sync: Sync, outer: str) -> None:
    """Raises `InputError` unless a parameter is an optimizer with its learning rate."""
    if not isinstance(outer, str):
        raise invalid_parameter(
            sync, f'outer must be an optimizer as a text, such as "sgd(learning_rate=1.0)", not {outer!r}'
        )
    if "learning_rate" not in parse(outer).args:
        raise invalid_parameter(sync, f'the outer optimizer needs its learning rate: outer="{outer}"')


def invalid_parameter(sync: Sync, problem: str) -> InputError:
    """Returns the error for a parameter."""
    return InputError(f"{sync.name}: {problem}. {sync.guide} explains the parameters.")


def check_multiples(sync: Sync, parameter: str) -> None:
    """Raises `InputError` unless a parameter is a tuple of integers, each a larger multiple of the one before."""
    values = getattr(sync, parameter)
    if not isinstance(values, tuple) or not all(is_integer(value) and value >= 1 for value in values):
        raise invalid_parameter(sync, f"{parameter} must be numbers of at least 1, such as (4, 16), not {values!r}")
    if any(later <= earlier or later % earlier for earlier, later in itertools.pairwise(values)):
        raise invalid_parameter(sync, f"{parameter} must grow, each a multiple of the one before, not {values!r}")
