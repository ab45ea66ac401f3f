"""Names of the data sets that the library has, for flags and for their catalog."""

# The argument that may follow a name and a colon; "" for none. `tfdist.data.catalog` has a function for each name.
AFTER_COLON = {
    "digits": "",
    "fashion_mnist": "",
    "mnist5k": "",
    "text": "",
    "csv": "path",
    "images": "path",
    "npz": "path",
    "synthetic": "shape",
    "tfds": "name",
    "tfrecord": "path",
}
# Those that a run directory may name in safe mode. Files of tensorflow-datasets name Python modules that it imports.
OF_RUNS = "|".join(f"{name}(:.*)?" if argument else name for name, argument in AFTER_COLON.items() if name != "tfds")
DATA_SETS = tuple(f"{name}:" if argument else name for name, argument in AFTER_COLON.items())
