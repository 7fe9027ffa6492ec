"""The site's filters: what the server sent is looked at, and what goes back was released, was sent, or was named by the owner.

They are `Filter`s, not `DXOFilter`s: those let every unknown kind of result, and every one with an error code, pass as it is. A reply is built
anew from what the gate lets out. Whatever is wrong becomes one error code; the reason is in the owner's log.

They run in the job's process. A job whose own code runs in that process too (an executor, a script `in_process`) can change them in memory:
admit reviewed code alone (`ReviewedJobs`), or none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from nvflare.apis.dxo import DXO, DataKind, MetaKey
from nvflare.apis.filter import ContentBlockedException, Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from torch import Tensor

from qbi.integrations.nvflare.exchange import MODELS, exchanged, like, tensors
from qbi.private.allowed import NotReleased
from qbi.private.boundary import REFUSED
from qbi.private.gate import Gate, Leaving
from qbi.private.owner import OwnersSite

TASK = "qbi task"
"""Where the first filter leaves the task for the second: in the context of one task, which does not travel."""

ROUNDS = (AppConstants.START_ROUND, AppConstants.CURRENT_ROUND, AppConstants.NUM_ROUNDS, AppConstants.VALIDATE_TYPE)
"""Headers that go back as they came."""

WEIGHT = "num-examples"
"""The owner's name for what NVFlare calls steps in this round: the weight of a client."""


@dataclass(frozen=True)
class AskedTask:
    """What the server asked, in copies: a trainer in the same process may change the arrays that it was given in place."""

    sent: dict[str, Tensor]
    example: dict[str, Any]
    """One array of the kind that came."""
    headers: dict[str, Any]

    @classmethod
    def of(cls, task: Shareable) -> "AskedTask":
        """A task as it came."""
        found = exchanged(task)
        arrays = dict(found.data) if found is not None and found.data_kind in MODELS else {}
        headers = {name: value for name in ROUNDS if (value := task.get_header(name)) is not None}
        return cls(tensors(arrays), dict(list(arrays.items())[:1]), headers)


class SiteData(Filter):  # type: ignore[misc]
    """For `task_data_filters`: looks at the model, and remembers it for the reply. `site`: the owner's file."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site  # where a job that carries the filter itself finds its argument
        self.gate = Gate(OwnersSite.read(site))

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The task as it came, or an error."""
        try:
            asked = AskedTask.of(shareable)
            fl_ctx.set_prop(TASK, asked, private=True, sticky=False)
            self.gate.look(asked.sent)
        except Exception as problem:
            _refuse(self.gate, problem)
        return shareable


class SiteResults(Filter):  # type: ignore[misc]
    """For `task_result_filters`: lets out what the gate lets out. `site`: the owner's file."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site  # where a job that carries the filter itself finds its argument
        self.gate = Gate(OwnersSite.read(site))

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """A reply made anew, or an error."""
        try:
            return self._judged(shareable, fl_ctx)
        except Exception as problem:
            # As a job's own error is answered: which of the two it was says something.
            self.gate.refuse(problem)
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)

    def _judged(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if shareable.get_return_code() != ReturnCode.OK:
            # Which code a job chose could carry something: one stands for all.
            self.gate.site.note("not answered: the job's own code answered with an error.")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        task = fl_ctx.get_prop(TASK)
        if not isinstance(task, AskedTask):
            raise NotReleased("nvflare: SiteData did not see the task; name both filters in privacy.json.")
        found = exchanged(shareable)
        if found is None or found.data_kind not in (*MODELS, DataKind.METRICS):
            kind = "no exchange object" if found is None else f"of kind {found.data_kind}"
            raise NotReleased(f"nvflare: the result is {kind}; models and metrics may leave.")
        sent, gate = task.sent, replace(self.gate, name=str(fl_ctx.get_identity_name()))
        if found.data_kind == DataKind.METRICS:
            left = gate.judge(sent, None, found.data)
            return _reply(DXO(DataKind.METRICS, _named(left)), task)
        differs = found.data_kind == DataKind.WEIGHT_DIFF
        arrays = tensors(found.data)
        if differs and self.gate.site.settings.policy == "update":
            arrays = _moved(sent, arrays)
        left = gate.judge(sent, arrays, _numbers(found.meta))
        assert left.arrays is not None
        out: Mapping[str, Tensor] = left.arrays
        if differs and self.gate.site.settings.policy == "update":
            out = {n: (v.double() - sent[n].double()).to(v.dtype) for n, v in out.items()}
        return _reply(DXO(found.data_kind, like(out, task.example or found.data), _meta(left)), task)


def _moved(sent: Mapping[str, Tensor], by: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights after a difference, which must be of the model that was sent."""
    if set(sent) != set(by) or any(sent[n].shape != v.shape for n, v in by.items()):
        raise NotReleased("nvflare: the difference is not one of the model that was sent.")
    return {n: (sent[n].double() + v.double()) if sent[n].is_floating_point() else sent[n] for n, v in by.items()}


def _numbers(meta: Mapping[str, Any]) -> dict[str, Any]:
    metrics = meta.get(MetaKey.INITIAL_METRICS)
    steps = {WEIGHT: meta[MetaKey.NUM_STEPS_CURRENT_ROUND]} if MetaKey.NUM_STEPS_CURRENT_ROUND in meta else {}
    return {**(metrics if isinstance(metrics, dict) else {}), **steps}


def _named(left: Leaving) -> dict[str, Any]:
    return {n: v for n, v in left.numbers.items() if n != WEIGHT}


def _meta(left: Leaving) -> dict[str, Any]:
    """Nothing of the reply's own: the client's weight, and what the owner named."""
    metrics = _named(left)
    return {
        **({MetaKey.NUM_STEPS_CURRENT_ROUND: left.numbers[WEIGHT]} if WEIGHT in left.numbers else {}),
        **({MetaKey.INITIAL_METRICS: metrics} if metrics else {}),
    }


def _reply(content: DXO, task: AskedTask) -> Shareable:
    out = content.to_shareable()
    for name, value in task.headers.items():
        out.set_header(name, value)
    out.set_return_code(ReturnCode.OK)
    return out


def _refuse(gate: Gate, problem: Exception) -> NoReturn:
    gate.refuse(problem)
    # Without its cause: the framework writes what is raised into a log that a job may stream to its server.
    raise ContentBlockedException(REFUSED) from None
