"""What would this model give away? Its structure, attacks on the user's own data, and how far to trust the answer."""

import sys
import types
from typing import Any

from qbi.audit.result import AuditResult
from qbi.audit.run import audit
from qbi.audit.samples import Samples, image_samples, tensor_samples, text_samples
from qbi.audit.trials import Client

__all__ = ["AuditResult", "Client", "Samples", "audit", "image_samples", "tensor_samples", "text_samples"]


class _Callable(types.ModuleType):
    """`qbi.audit` is a package and, as users write it, the function of the same name."""

    def __call__(self, *args: Any, **options: Any) -> AuditResult:
        """See `qbi.audit.audit`."""
        return audit(*args, **options)


sys.modules[__name__].__class__ = _Callable
