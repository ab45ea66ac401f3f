"""All uses of private names of Keras and TensorFlow. No other package imports a private name.

`tests/keras_internals/` has a test for each, so that a new release of Keras or TensorFlow fails there first.
"""

from tfdist.keras_internals.fitting import *
from tfdist.keras_internals.functional import *
from tfdist.keras_internals.laid_out_operations import *
from tfdist.keras_internals.layers import *
from tfdist.keras_internals.models import *
from tfdist.keras_internals.optimizers import *
from tfdist.keras_internals.patching import *
from tfdist.keras_internals.tf_internals import *
from tfdist.keras_internals.variables import *
