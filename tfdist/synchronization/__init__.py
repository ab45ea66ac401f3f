"""Exchanges of weights between replicas that train locally in between: local SGD and its family, `--sync`.

`Exchanges` is what a fit loop calls between its calls of the compiled loop. What a replica does between exchanges is in
`tfdist.step`; what travels is summed by the reducers of `tfdist.gradients`.
"""

from tfdist.synchronization.interface import Exchanges

__all__ = ["Exchanges"]
