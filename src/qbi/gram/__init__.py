"""The law of a random layer's activations on given data, through inner products alone."""

from qbi.gram.rows import (
    CHUNK,
    Conditional,
    Law,
    condition,
    fire_probability,
    gram,
    law,
    laws,
    lift,
)

__all__ = ["CHUNK", "Conditional", "Law", "condition", "fire_probability", "gram", "law", "laws", "lift"]
