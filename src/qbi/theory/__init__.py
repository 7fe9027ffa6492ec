"""Closed forms without torch: what a crafted layer is expected to leak, and what noise lets nobody read."""

from qbi.theory.leakage import (
    ACTIVE_LIMIT,
    UNIQUE_LIMIT,
    Expectation,
    bias_for_probability,
    exact_bias,
    expectation,
    expected_active,
    expected_precision,
    expected_recall,
    fire_probability,
    isolation_probability,
    neurons_needed,
    optimal_bias,
)

__all__ = [
    "ACTIVE_LIMIT",
    "UNIQUE_LIMIT",
    "Expectation",
    "bias_for_probability",
    "exact_bias",
    "expectation",
    "expected_active",
    "expected_precision",
    "expected_recall",
    "fire_probability",
    "isolation_probability",
    "neurons_needed",
    "optimal_bias",
]
