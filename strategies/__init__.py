"""The strategies of tfdist, one file each; installed and imported as `tfdist.strategies`.

The strategy NAME is the class `STRATEGY` of NAME.py, with its options in `tfdist.config.strategy_registry`. It imports none of
the packages of a run, such as `step`, `trainer` and `cli`, and no other strategy.
"""

if __name__ != "tfdist.strategies":
    raise ImportError(
        "The strategies are imported as tfdist.strategies. "
        f"Received: import {__name__}. Run `pip install -e .` in the checkout, then import tfdist.strategies."
    )
