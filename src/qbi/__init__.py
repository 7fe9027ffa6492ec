"""What a federated-learning server could read out of its clients' gradients, and what stops it."""

__version__ = "0.1.0"
