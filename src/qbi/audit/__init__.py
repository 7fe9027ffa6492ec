"""What would this model give away? The attack, a real client step, and the count of what came back."""

from qbi.audit.images import AuditResult, audit_images

__all__ = ["AuditResult", "audit_images"]
