"""What would this model give away? Its structure, attacks on the user's own data, and how far to trust the answer."""

from qbi.auditing.client import Client
from qbi.auditing.result import AuditResult
from qbi.auditing.run import audit
from qbi.auditing.samples import Samples, image_samples, tensor_samples, text_samples

__all__ = ["AuditResult", "Client", "Samples", "audit", "image_samples", "tensor_samples", "text_samples"]
