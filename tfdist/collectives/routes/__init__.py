"""Routes of an all-reduce: functions that sum a vector over replicas by messages between some of them, and their choice.

A route is a function of a vector, the collectives of all replicas and their places on hosts; `catalog` lists all of them with
the groups of ranks that they use, which some engines have to know when they start. `routed` makes them the all-reduce of
other `Collectives`. In the costs, n is the number of bytes of the vector and N the number of replicas.
"""

from tfdist.collectives.routes.catalog import CATALOG, Route, groups_of
from tfdist.collectives.routes.routed import Routed, check_route, possible_routes, routed

__all__ = ["CATALOG", "Route", "Routed", "check_route", "groups_of", "possible_routes", "routed"]
