"""A client's local step, and what the server receives of it."""

from qbi.federation.client import Loss, client_step, default_loss

__all__ = ["Loss", "client_step", "default_loss"]
