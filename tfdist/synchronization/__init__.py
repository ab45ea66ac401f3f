"""Weight exchanges between replicas that train locally: local SGD and related methods (`--sync`).

A fit loop calls a `WeightSynchronizer` between calls of the compiled loop: `periodic` decides when weights are exchanged,
and `exchange` exchanges them, with the reducers of `tfdist.gradients`. The local steps are in `tfdist.step`.
`server_updates` is the loop of a worker of parameter servers.
"""

from tfdist.synchronization.interface import WeightSynchronizer

__all__ = ["WeightSynchronizer"]
