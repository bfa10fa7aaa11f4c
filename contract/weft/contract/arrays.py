"""Names of numpy's arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
NO_NUMBERS: Int64Array = np.zeros(0, np.int64)
