"""Privacy filters of other people's frameworks, each through its own code: from what was sent and trained to what arrives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qbi.auditing.claim_records import PrivacySetting
from qbi.errors import BadValue, MissingExtra

State = dict[str, Tensor]
Filtered = Callable[[State, State], State]
"""From what was sent and what training made of it to what arrives."""

OF_NVFLARE = ("PercentilePrivacy", "SVTPrivacy", "ExcludeVars")
OF_FLOWER = ("fixedclipping_mod", "adaptiveclipping_mod", "LocalDpMod")


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


def filter_of(setting: PrivacySetting) -> Filtered:
    """The framework's own code for a setting; raises for one that cannot be run alone."""
    if setting.mechanism in OF_NVFLARE:
        return nvflare_filter(setting.mechanism, **setting.arguments)
    if setting.mechanism in OF_FLOWER:
        return flower_mod(setting.mechanism, **setting.arguments)
    if setting.mechanism == "secaggplus_mod":
        return secure_sum(1)
    raise BadValue(f"claims: {setting.mechanism} has no filter that could be run here; its ε stands in the table.")
