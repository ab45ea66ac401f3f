"""Parses `--sync`: how often replicas exchange their weights, and how. Does not import TensorFlow."""

import dataclasses
from typing import ClassVar

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_number
from tfdist.grammar.local_sgd import DiLoCo, HierarchicalLocalSGD, LocalSGD, PostLocalSGD
from tfdist.grammar.spec import call, nearest, parse
from tfdist.grammar.sync_base import (
    Averaging,
    EveryStep,
    Periodic,
    Sync,
    check_choice,
    check_fraction,
    check_integer,
    check_outer,
    invalid_parameter,
)

__all__ = [
    "EASGD",
    "SYNCS",
    "Averaging",
    "DiLoCo",
    "EveryStep",
    "FedAvg",
    "HierarchicalLocalSGD",
    "LocalSGD",
    "Periodic",
    "PostLocalSGD",
    "Sync",
    "parse_sync",
]
CLIENT_SIZES = ("equal", "power_law")
_WORDS = ("state", "client_sizes")  # may be without quotes
DEFAULT = "every_step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EASGD(Periodic):
    """Elastic averaging: replicas and a center attract each other (Zhang et al., arXiv:1412.6651), synchronous.

    With a momentum optimizer on each replica, as `--optimizer="sgd(momentum=0.9, nesterov=True)"`, it is EAMSGD.

    Attributes:
      period: see base class; 10 in the experiments of the paper.
      alpha: fraction of its distance to the center by which a replica moves in an exchange, in (0, 1); None for 0.9 / N
        with N replicas. At most 1 / N, so that the center remains a mean of weights.
    """

    name: ClassVar[str] = "easgd"
    has_center: ClassVar[bool] = True
    period: int = 10
    alpha: float | None = None

    def __post_init__(self) -> None:
        """Validates the parameters."""
        super().__post_init__()
        if self.alpha is not None:
            check_fraction(self, "alpha")

    def effective_alpha(self, replicas: int) -> float:
        """Returns `alpha`, or its default for a number of replicas."""
        return 0.9 / replicas if self.alpha is None else self.alpha

    def check_alpha(self, replicas: int) -> None:
        """Raises `InputError` if `alpha` is larger than 1 / N."""
        alpha = self.effective_alpha(replicas)
        if alpha * replicas > 1:
            raise invalid_parameter(self, f"alpha must be at most 1/{replicas} with {replicas} replicas, not {alpha:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvg(Sync):
    """Federated averaging over virtual clients (McMahan et al., arXiv:1602.05629); a step is a round.

    The training data is divided among `clients`. In round t, m = max(1, round(fraction * clients)) of them are drawn. Each
    starts from the global weights x with a fresh optimizer, and makes `local_epochs` passes over its n_k examples in
    batches of `--batch_size`, of which the last may be short, which gives weights w_k. Then

        d = sum over k of n_k (x - w_k) / sum over k of n_k,        x' = outer(x, d)

    Attributes:
      clients: number of clients, at least 1.
      fraction: part of the clients that is drawn in each round, in (0, 1].
      local_epochs: passes of a drawn client over its data, at least 1.
      shards_per_client: 0 divides the examples at random; otherwise they are sorted by class and cut into shards, of which each
        client gets this number, so that most clients know no more classes than that.
      client_sizes: "equal", or "power_law": client i has a number of examples proportional to 1 / i.
      proximal: factor mu of FedProx's term mu / 2 |w - x|^2 in a client's loss (Li et al., arXiv:1812.06127).
      outer: the optimizer of the global weights, as in `--optimizer`, with its learning rate (Reddi et al.,
        arXiv:2003.00295). The default is FedAvg: the weighted mean of the clients' weights.
    """

    name: ClassVar[str] = "fedavg"
    trains_clients: ClassVar[bool] = True
    guide: ClassVar[str] = "docs/guides/federated.md"

    clients: int = 100
    fraction: float = 0.1
    local_epochs: int = 1
    shards_per_client: int = 0
    client_sizes: str = "equal"
    proximal: float = 0.0
    outer: str = "sgd(learning_rate=1.0)"

    def __post_init__(self) -> None:
        """Validates the parameters."""
        check_integer(self, "clients", 1, "clients")
        check_integer(self, "local_epochs", 1, "epochs")
        check_integer(self, "shards_per_client", 0, "shards")
        check_choice(self, "client_sizes", CLIENT_SIZES)
        if not is_number(self.fraction) or not 0 < self.fraction <= 1:
            raise invalid_parameter(self, f"fraction must be a number in (0, 1], not {self.fraction!r}")
        if not is_number(self.proximal) or not 0 <= self.proximal < float("inf"):
            raise invalid_parameter(self, f"proximal must be a number of at least 0, not {self.proximal!r}")
        check_outer(self, self.outer)

    @property
    def drawn(self) -> int:
        """Number of clients that train in a round."""
        return max(1, round(self.fraction * self.clients))

    def examples_per_step(self, size: int, batch_size: int) -> int:
        """See base class: the number of examples that a round uses on average."""
        return max(1, round(size * self.local_epochs * self.drawn / self.clients))


SYNCS: dict[str, type[Sync]] = {
    kind.name: kind
    for kind in (
        EveryStep,
        LocalSGD,
        PostLocalSGD,
        HierarchicalLocalSGD,
        DiLoCo,
        EASGD,
        FedAvg,
    )
}


def parse_sync(text: str) -> Sync:
    """Parses the value of `--sync`, such as `local_sgd(period=8)`.

    Raises:
      InputError: the name or a parameter is unknown or out of range.
    """
    spec = parse(text, _WORDS)
    if spec.name not in SYNCS:
        raise InputError(f"{spec.name} is not a known synchronization method.{nearest(spec.name, SYNCS)}")
    found: Sync = call(SYNCS[spec.name], spec)
    return found
