"""Exchanges of weights between replicas that train locally in between: local SGD and its family, `--sync`.

A fit loop calls a `WeightSynchronizer` between its calls of the compiled loop. The steps between exchanges are in
`tfdist.step`; changes of weights are summed by the reducers of `tfdist.gradients`.
"""

from tfdist.synchronization.interface import WeightSynchronizer

__all__ = ["WeightSynchronizer"]
