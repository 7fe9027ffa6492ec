"""Uses of parameters: a gradient is a sum, over the operations a parameter takes part in, of input ⊗ backprop."""

from qbi.uses import attention as _attention  # noqa: F401  (registers its operation)
from qbi.uses import experts as _experts  # noqa: F401  (registers its operations)
from qbi.uses import recurrent as _recurrent  # noqa: F401  (registers its operations)
from qbi.uses.capture import Capture, Use
from qbi.uses.operations import OPERATIONS, operation

__all__ = ["OPERATIONS", "Capture", "Use", "operation"]
