"""The strategies of tfdist, one file each; installed and imported as `tfdist.strategies`.

They are outside of the engine because they are plug-ins: each imports packages of tfdist from `errors` to `pipelining`,
but no other strategy, and tfdist loads it by name.
"""

if __name__ != "tfdist.strategies":
    raise ImportError(
        "The strategies are imported as tfdist.strategies. "
        f"Received: import {__name__}. Run `pip install -e .` in the checkout, then import tfdist.strategies."
    )
