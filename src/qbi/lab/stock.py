"""Stock privacy filters of NVFlare, Flower and Opacus at their defaults and documented settings, each through its framework's own code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qbi.auditing.claims import PrivacySetting
from qbi.errors import MissingExtra

State = dict[str, Tensor]
Filtered = Callable[[State, State], State]
"""From what was sent and what training made of it to what arrives."""


def as_it_is(_sent: State, trained: State) -> State:
    """No filter."""
    return trained


def nvflare_filter(name: str, **arguments: Any) -> Filtered:
    """A filter of NVFlare's, on the difference of weights, as a DXO."""

    def apply(sent: State, trained: State) -> State:
        try:
            from nvflare.apis.dxo import DXO, DataKind, from_shareable
            from nvflare.apis.fl_context import FLContext
            from nvflare.app_common.filters import exclude_vars, percentile_privacy, svt_privacy
        except ImportError as problem:
            raise MissingExtra("nvflare", "nvflare") from problem
        known = {
            "PercentilePrivacy": percentile_privacy.PercentilePrivacy,
            "SVTPrivacy": svt_privacy.SVTPrivacy,
            "ExcludeVars": exclude_vars.ExcludeVars,
        }
        moved = {n: (trained[n] - sent[n]).numpy() for n in sent}
        shareable = DXO(DataKind.WEIGHT_DIFF, moved).to_shareable()
        out = from_shareable(known[name](**arguments).process(shareable, FLContext())).data
        return {n: sent[n] + torch.from_numpy(out[n]) if n in out else sent[n].clone() for n in sent}

    return apply


def flower_mod(name: str, clipping_norm: float = 1.0, **arguments: Any) -> Filtered:
    """A mod of Flower's, around a client that answers with what it trained."""

    def apply(sent: State, trained: State) -> State:
        try:
            from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
            from flwr.clientapp import mod
            from flwr.supercore.task_identity import TaskIdentity
        except ImportError as problem:
            raise MissingExtra("flwr", "flower") from problem
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in a client's own process
        config = ConfigRecord({"clipping_norm": clipping_norm})
        ask = Message(RecordDict({"arrays": ArrayRecord(sent), "config": config}), dst_node_id=1, message_type="train")
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        content = RecordDict({"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": 1})})
        call = mod.LocalDpMod(clipping_norm=clipping_norm, **arguments) if name == "LocalDpMod" else getattr(mod, name)
        reply = call(ask, context, lambda msg, _: Message(content, reply_to=msg))
        arrays = reply.content["arrays"]
        assert isinstance(arrays, ArrayRecord)
        return {n: torch.from_numpy(a.numpy().copy()) for n, a in arrays.items()}

    return apply


def secure_sum(clients: int) -> Filtered:
    """What SecAgg+ does to one client's weights besides adding others': clipping and quantising, with its own defaults."""

    def apply(_sent: State, trained: State) -> State:
        try:
            from flwr.common.secure_aggregation.quantization import dequantize, quantize
        except ImportError as problem:
            raise MissingExtra("flwr", "flower") from problem
        arrays = [v.numpy().astype(np.float64) for v in trained.values()]
        back = dequantize(quantize(arrays, 8.0, 4194304), 8.0, 4194304)
        return {n: torch.from_numpy(np.asarray(v)).float() for n, v in zip(trained, back, strict=True)}

    apply.__doc__ = f"{clients} clients"
    return apply


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
