"""The dtypes of checkpoints: those of NumPy and ml_dtypes, and their names in safetensors."""

import ml_dtypes
import numpy as np

_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}

# Little-endian, as in safetensors. NumPy does not know the names of ml_dtypes until it is imported.
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)).newbyteorder("<") for name in _CODES}


def is_known(dtype: np.dtype) -> bool:
    """Returns whether arrays of this dtype can be stored; those with the other byte order cannot."""
    return DTYPES.get(dtype.name) == dtype


def code(name: str) -> str:
    """Returns the name of a dtype of `DTYPES` in safetensors."""
    return _CODES[name]
