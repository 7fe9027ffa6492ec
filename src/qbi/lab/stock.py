"""Stock privacy filters of NVFlare, Flower and Opacus at their defaults and documented settings."""

from dataclasses import dataclass
from typing import Any

from qbi.auditing.claim_records import PrivacySetting
from qbi.integrations.stock import Filtered, as_it_is, flower_mod, nvflare_filter, secure_sum


@dataclass(frozen=True)
class StockFilter:
    """A filter at one setting."""

    name: str
    settings: str
    apply: Filtered
    claim: PrivacySetting | None = None
    clients: int = 1
    noise: float | None = None
    """Of Opacus, whose own optimiser makes the gradients."""


def _claimed(mechanism: str, **arguments: Any) -> PrivacySetting:
    return PrivacySetting("stock", mechanism, arguments)


LOCAL = {"sensitivity": 1.0, "epsilon": 1.0, "delta": 1e-5}
FLIP = {"sensitivity": 1e-4, "epsilon": 10.0, "delta": 1e-5}
SPARSE = {"fraction": 0.6, "epsilon": 0.001, "noise_var": 1.0, "gamma": 1e-5, "tau": 1e-6}
FILTERS: tuple[StockFilter, ...] = (
    StockFilter("none", "", as_it_is),
    StockFilter("PercentilePrivacy", "defaults", nvflare_filter("PercentilePrivacy"), _claimed("PercentilePrivacy")),
    StockFilter(
        "PercentilePrivacy",
        "percentile 50, gamma 0.01",
        nvflare_filter("PercentilePrivacy", percentile=50, gamma=0.01),
        _claimed("PercentilePrivacy"),
    ),
    StockFilter("SVTPrivacy", "defaults", nvflare_filter("SVTPrivacy"), _claimed("SVTPrivacy")),
    StockFilter(
        "SVTPrivacy",
        "fraction 0.6, noise_var 1",
        nvflare_filter("SVTPrivacy", **SPARSE),
        _claimed("SVTPrivacy", **SPARSE),
    ),
    StockFilter(
        "ExcludeVars",
        "the last layer",
        nvflare_filter("ExcludeVars", exclude_vars=["3.weight", "3.bias"]),
        _claimed("ExcludeVars"),
    ),
    StockFilter("fixedclipping_mod", "clip 1", flower_mod("fixedclipping_mod"), _claimed("fixedclipping_mod")),
    StockFilter(
        "adaptiveclipping_mod", "clip 0.1", flower_mod("adaptiveclipping_mod", 0.1), _claimed("adaptiveclipping_mod")
    ),
    StockFilter(
        "LocalDpMod",
        "clip 1, sensitivity 1, ε 1",
        flower_mod("LocalDpMod", **LOCAL),
        _claimed("LocalDpMod", clipping_norm=1.0, **LOCAL),
    ),
    StockFilter(
        "LocalDpMod",
        "clip 1, sensitivity 1e-4, ε 10",
        flower_mod("LocalDpMod", **FLIP),
        _claimed("LocalDpMod", clipping_norm=1.0, **FLIP),
    ),
    StockFilter("SecAgg+", "5 clients", secure_sum(5), _claimed("secaggplus_mod"), clients=5),
    StockFilter("SecAgg+", "5 clients, of whom 4 are sybils", secure_sum(1), _claimed("secaggplus_mod")),
    StockFilter(
        "Opacus",
        "noise 1, clip 1",
        as_it_is,
        _claimed("Opacus", noise_multiplier=1.0, sample_rate=0.01, steps=100),
        noise=1.0,
    ),
)
