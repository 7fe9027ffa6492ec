"""A fixture for pytest: `qbi_audit(model, data)` fails the test where a server reads more than may be read.

def test_updates_keep_their_samples(qbi_audit):
    qbi_audit(make_model(), (x, y), client=qbi.Client(batch_size=32))

`--qbi-fail-above 0.1` sets the share for all tests that name none. pytest finds the plugin by its entry point; nothing heavy is
imported before a test asks for an audit.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn

    from qbi.auditing import AuditResult


@pytest.hookimpl
def pytest_addoption(parser: pytest.Parser) -> None:
    """`--qbi-fail-above`."""
    parser.getgroup("qbi", "what a federated-learning server could read").addoption(
        "--qbi-fail-above",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="Fail a qbi_audit where more than this share of samples is read (default: 0, anything at all).",
    )


@pytest.fixture
def qbi_audit(request: pytest.FixtureRequest) -> Callable[..., "AuditResult"]:
    """Audit a model on data: `qbi_audit(model, data, fail_above=None, allow_untested=False, **options of qbi.audit)`.

    It returns the result, and leaves share, status and verdict as properties of the test, which JUnit files show.
    """

    def run(
        model: "nn.Module",
        data: Any,
        *,
        fail_above: float | None = None,
        allow_untested: bool = False,
        **options: Any,
    ) -> "AuditResult":
        from qbi.auditing import audit
        from qbi.integrations.judging import check_share, objection

        asked = request.config.getoption("--qbi-fail-above") if fail_above is None else fail_above
        limit = check_share("fail_above", asked)
        result = audit(model, data, **options)
        found = {"qbi_share": result.share, "qbi_status": result.status, "qbi_verdict": result.verdict}
        request.node.user_properties.extend(found.items())
        problem = objection(result, limit, allow_untested=allow_untested)
        if problem:
            pytest.fail(problem, pytrace=False)
        return result

    return run


def _share(text: str) -> float:
    import argparse

    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share; it lies between 0 and 1")
    return share
