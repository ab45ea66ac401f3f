"""Exchanges of weights between replicas that train locally in between: local SGD and its family, `--sync`.

A fit loop calls a `WeightSynchronizer` between its calls of the compiled loop: `periodic` decides when weights are exchanged,
and `exchange` exchanges them. The steps in between are in `tfdist.step`; changes of weights are summed by the reducers of
`tfdist.gradients`. `server_updates` is the loop of a worker of parameter servers.
"""

from tfdist.synchronization.interface import WeightSynchronizer

__all__ = ["WeightSynchronizer"]
