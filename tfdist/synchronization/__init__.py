"""Weight exchanges between replicas that train locally: local SGD and related methods (`--sync`).

In every run, a `WeightSynchronizer` gives the fit loop its batches and its compiled loop. The base class exchanges nothing,
since steps sum gradients; others exchange weights between calls of the loop: `periodic` decides when, and `exchange` averages
them, with the reducers of `tfdist.gradients`. `server_updates` is the loop of a worker of parameter servers.
"""

from tfdist.synchronization.interface import WeightSynchronizer

__all__ = ["WeightSynchronizer"]
