"""The topology of a job: the ranks on each host."""

import dataclasses
import re
from collections.abc import Sequence

from tfdist.errors import InputError


def parse_topology(text: str) -> tuple[int, ...] | None:
    """Returns the number of ranks on each host; None if `text` is not a list of positive integers."""
    counts = [count.strip() for count in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", count) for count in counts):
        return None
    return tuple(map(int, counts))


@dataclasses.dataclass(frozen=True)
class Topology:
    """The hosts of a job's replicas.

    Attributes:
      host_by_rank: index of the host of each rank; hosts are numbered in the order of their first ranks.
    """

    host_by_rank: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, replicas: int) -> "Topology":
        """Parses the number of consecutive ranks on each host, such as "2,2".

        Args:
          text: comma-separated positive integers.
          replicas: number of replicas of the job.

        Raises:
          InputError: `text` is not a list of positive integers, or their sum is not the number of replicas.
        """
        counts = parse_topology(text)
        if counts is None or sum(counts) != replicas:
            half = replicas // 2
            example = f"{replicas - half},{half}" if half else "1"
            raise InputError(
                f"--topology must be the number of ranks on each host, with a sum of {replicas}, the number of replicas. "
                f"Received: {text}. For example, pass --topology={example}."
            )
        return cls(tuple(host for host, count in enumerate(counts) for _ in range(count)))

    @classmethod
    def from_host_names(cls, names: Sequence[str]) -> "Topology":
        """Creates the topology from the host name of each rank."""
        host_indices = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(host_indices[name] for name in names))

    @property
    def size(self) -> int:
        """Number of replicas."""
        return len(self.host_by_rank)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(set(self.host_by_rank))

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """Returns the ranks on a host, in order."""
        return tuple(rank for rank, rank_host in enumerate(self.host_by_rank) if rank_host == host)

    def __str__(self) -> str:
        """Returns the number of ranks on each host, which `parse` accepts if the ranks of each host are consecutive."""
        return ",".join(str(len(self.ranks_of(host))) for host in range(self.hosts))
