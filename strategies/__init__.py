"""The strategies of tfdist, one file each; installed and imported as `tfdist.strategies`.

Strategies are plug-ins that tfdist loads by name. A strategy may import the packages up to `pipelining` in the list of
CONTRIBUTING.md, but no other strategy.
"""

if __name__ != "tfdist.strategies":
    raise ImportError(
        "The strategies are imported as tfdist.strategies. "
        f"Received: import {__name__}. Run `pip install -e .` in the checkout, then import tfdist.strategies."
    )
