"""The `Strategy` interface, lookup of strategies by name, and the engines that strategies share.

A `Strategy` also differentiates and updates variables (`gradients`, `apply`). `factory.start` imports `tfdist.strategies.NAME`
from the top-level directory `strategies/`; the constructor of the strategy joins the job's group and starts its engine.
"""
