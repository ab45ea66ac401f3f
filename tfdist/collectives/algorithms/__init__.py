"""All-reduce algorithms, composed of messages and of collectives among some replicas, and their choice by size.

An algorithm is a function of a vector, the collectives of all replicas and their places on hosts; `catalog` lists all of them
with the groups of ranks that they use, which some engines have to know when they start. `tuned` makes them the all-reduce of
other `Collectives`. In the costs, n is the number of bytes of the vector and N the number of replicas.
"""

from tfdist.collectives.algorithms.catalog import CATALOG, Algorithm, groups_of
from tfdist.collectives.algorithms.tuned import (
    TunedCollectives,
    check_algorithm,
    possible_algorithms,
    tuned_collectives,
)

__all__ = [
    "CATALOG",
    "Algorithm",
    "TunedCollectives",
    "check_algorithm",
    "groups_of",
    "possible_algorithms",
    "tuned_collectives",
]
