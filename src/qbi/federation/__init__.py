"""A client's local step or training, and what the server receives of it."""

from qbi.federation.client import Loss, client_step, default_loss
from qbi.federation.local import LocalTraining, local_update

__all__ = ["LocalTraining", "Loss", "client_step", "default_loss", "local_update"]
