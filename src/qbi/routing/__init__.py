"""From a model to the ways a sample takes through it: its graph, and how a server would carry a sample to a layer."""

from qbi.routing.carry import carry_to
from qbi.routing.graph import Traced, trace

__all__ = ["Traced", "carry_to", "trace"]
