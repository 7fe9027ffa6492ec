"""Whether an audit may pass: one rule for every place that stops on a finding."""

from qbi.auditing import AuditResult
from qbi.errors import BadValue, QbiError


class AuditFailed(QbiError):
    """More was read than may be, or something could not be tested; training has not begun."""


def check_share(place: str, share: float) -> float:
    """Refuse a threshold that is no share."""
    if not 0 <= share <= 1:
        raise BadValue(f"{place}: {share} is no share; it lies between 0 and 1.")
    return share


def objection(result: AuditResult, fail_above: float, *, allow_untested: bool = False) -> str:
    """Why the audit fails, with its verdict and its advice; empty where it passes.

    A model that could not be tested throughout fails as well, unless that is allowed: not tested is not safe.
    """
    if result.share > fail_above:
        reason = f"{100 * result.share:.1f} % is read, and at most {100 * fail_above:.1f} % may be."
    elif (result.status == "not tested" or (fail_above < 1 and result.untested_parameters)) and not allow_untested:
        untested = [o.layer for o in result.outcomes if o.status == "not tested"] or result.untested_parameters
        named = f" ({', '.join(untested[:5])}{', …' if len(untested) > 5 else ''})" if untested else ""
        reason = f"Part of the model was not tested{named}; allow_untested=True lets that pass."
    else:
        return ""
    return "\n".join([f"qbi: {reason} {result.verdict}", *(f"- {line}" for line in result.advice)])
