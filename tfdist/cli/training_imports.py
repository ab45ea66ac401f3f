"""What the commands that train import once their flags are parsed; a launcher imports it once for all of its ranks.

It initializes no device: processes forked afterwards initialize their own.
"""

import tensorflow  # noqa: F401

import tfdist.cli.dry_run
import tfdist.cli.opened_run
import tfdist.cli.session
import tfdist.distribution.tf_distribute
import tfdist.keras_fit
import tfdist.reporting.event_file  # noqa: F401
