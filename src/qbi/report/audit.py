"""An audit for people and pipelines: one self-contained page, SARIF, JUnit."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from PIL import Image
from torch import Tensor

from qbi.errors import printable, without_controls
from qbi.metrics import EXACT, RECOGNISABLE, THRESHOLDS
from qbi.private.boundary import THREE_LINES
from qbi.private.goal import DEFAULT_BITS
from qbi.report.first_screen import key_figures, severity
from qbi.report.glossary import meanings, shown_terms
from qbi.report.pictures import to_image, to_png
from qbi.report.wording import threshold_words

LARGEST = 112
"""Side of a picture in the page, in pixels; larger samples are shown smaller."""

Words = Sequence[Sequence[tuple[str, bool]]]


def audit_page(
    document: Mapping[str, Any],
    *,
    command: str,
    truth: Tensor | None = None,
    read: Tensor | None = None,
    exact: Sequence[bool] = (),
    seen: Sequence[bool] = (),
    texts: Words = (),
    made: Mapping[str, tuple[Tensor | None, Tensor | None]] | None = None,
) -> str:
    """The report; `made` are images and what was made of them, as `decoded`, `matched` and `patches`.

    Without `truth`, `texts` and `made` nothing of the client's data stands in it.
    """
    from jinja2 import Environment

    template = files("qbi.report").joinpath("audit.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(percent=_percent, interval=_interval)
    pairs = []
    if truth is not None and read is not None:
        for i in range(len(truth)):
            pairs.append({"truth": _png(truth[i]), "read": _png(read[i]) if seen[i] else "", "exact": bool(exact[i])})
    layer = document["verdict"]["layer"]
    lost = {loss["at"] for entry in document["layers"] if entry["name"] == layer for loss in entry["losses"]}
    width = next((entry["neurons"] for entry in document["layers"] if entry["name"] == layer), 0)
    nonce = hashlib.sha256(repr(sorted(document["verdict"].items(), key=str)).encode()).hexdigest()[:24]
    kind = document["data"]["kind"]
    page = environment.from_string(template).render(
        d=document,
        command=command,
        pairs=pairs,
        made={name: _picture_pairs(*images) for name, images in (made or {}).items()},
        texts=texts,
        lost=lost,
        own={"neurons": width, "batch_size": document["client"]["batch_size"]},
        nonce=nonce,
        frontier=_frontier(),
        severity=severity(document),
        figures=key_figures(document),
        means=meanings(kind),
        terms=shown_terms(kind),
        budget_start=next((i for i, b in enumerate(document["budgets"]) if b["bits"] >= DEFAULT_BITS), 0),
        three_lines=THREE_LINES,
        exact=EXACT.key,
        recognisable=RECOGNISABLE.key,
        thresholds=[{"key": t.key, "words": threshold_words(t, kind)} for t in THRESHOLDS],
        loosest=threshold_words(RECOGNISABLE, kind),
        pictures=kind == "images",
    )
    return without_controls(page)


def _picture_pairs(held: Tensor | None, made: Tensor | None) -> list[dict[str, Any]]:
    """Images, and the pictures that a decoder or a descent made of them; which of these are recognisable."""
    if held is None or made is None:
        return []
    near = (held - made).square().flatten(1).mean(1) <= RECOGNISABLE.largest_error(1.0)
    return [{"truth": _png(t), "read": _png(m), "seen": bool(n)} for t, m, n in zip(held, made, near, strict=True)][:24]


def _frontier() -> list[dict[str, Any]]:
    """Accuracy by noise as `qbi frontier` measured it: the best optimiser and rate of each, B = 64 and 200."""
    text = files("qbi.report").joinpath("frontier.json").read_text(encoding="utf-8")
    return list(json.loads(text)["curves"])


def _png(sample: Tensor) -> str:
    image = to_image(sample.float(), 1)
    if max(image.size) > LARGEST:
        image.thumbnail((LARGEST, LARGEST), Image.Resampling.BOX)
    return base64.b64encode(to_png(image)).decode()


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _interval(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    width = "" if found["low"] is None else f" ± {50 * (found['high'] - found['low']):.1f}"
    return f"{100 * found['mean']:.1f}{width}"


def _threshold_words(document: Mapping[str, Any]) -> str:
    """The threshold that a gate goes by, for this kind of data."""
    wanted = next(t for t in THRESHOLDS if t.key == document["verdict"]["threshold"])
    return threshold_words(wanted, document["data"]["kind"])


def _leaks(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Everything that reads something: attacks, and what leaves a layer without one (tokens of a table)."""
    beside = [
        {"attack": s["what"], "layer": s["layer"], "unit": s["what"], "share": s["share"]}
        for s in document.get("side_information", ())
        if s["what"] == "tokens" and s["share"] > 0
    ]
    for name, key in (("gradient matching", "matched"), ("patches put together", "patches")):
        found = document.get(key)
        if found and found["share"] > 0:
            place = found.get("layer", "the model")
            beside.append({"attack": name, "layer": place, "unit": "samples", "share": found["share"]})
    return [*document["attacks"], *beside]


def to_sarif(document: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """SARIF 2.1.0: one result for each attack that reads more than the limit, an error; others are notes."""
    results = []
    words = _threshold_words(document)
    for attack in _leaks(document):
        share = attack["share"]
        if share == 0:
            continue
        text = f"{attack['attack']} reads {100 * share:.3g} % of {attack['unit']} {words} through {attack['layer']}."
        results.append(
            {
                "ruleId": "gradient-leakage",
                "level": "error" if share > limit else "note",
                "message": {"text": text},
                "locations": _locations(document["model"]["name"], attack["layer"]),
            }
        )
    named = {attack["layer"] for attack in _leaks(document) if attack["share"] > 0}
    for outcome in document["outcomes"]:
        if outcome["status"] == "leaks" and outcome["layer"] not in named:
            results.append(
                {
                    "ruleId": "gradient-leakage",
                    "level": "note",
                    "message": {"text": f"{outcome['layer']} leaks, though nothing is read {words}; see the report."},
                    "locations": _locations(document["model"]["name"], outcome["layer"]),
                }
            )
        if outcome["status"] == "not tested":
            results.append(
                {
                    "ruleId": "not-tested",
                    "level": "warning",
                    "kind": "open",
                    "message": {"text": f"{outcome['layer']} was not tested: {outcome['reason']}"},
                    "locations": _locations(document["model"]["name"], outcome["layer"]),
                }
            )
    rule = {
        "id": "gradient-leakage",
        "shortDescription": {"text": "Training samples can be read out of a client's update."},
        "help": {"text": "Train the client with the private step (qbi.Private) or change the layer; see the report."},
    }
    open_rule = {
        "id": "not-tested",
        "shortDescription": {"text": "A layer of which nothing is known: no attack could be tried on it."},
        "help": {"text": "Not tested is not safe. See the report for the reason."},
    }
    driver = {"name": "qbi", "version": document["versions"]["qbi"], "rules": [rule, open_rule]}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _locations(model: str, layer: str) -> list[dict[str, Any]]:
    """The layer by name, and the file that makes the model: code scanning takes no result without a file."""
    place, _, _ = model.rpartition(":")
    file = (
        place if place.endswith(".py") else f"{place.replace('.', '/')}.py" if re.fullmatch(r"[\w.]+", place) else model
    )
    return [
        {
            "physicalLocation": {"artifactLocation": {"uri": quote(file)}, "region": {"startLine": 1}},
            "logicalLocations": [{"fullyQualifiedName": f"{model}.{layer}", "kind": "member"}],
        }
    ]


def to_junit(document: Mapping[str, Any], limit: float) -> str:
    """JUnit XML: one test for each attack on a layer; it fails where more than the limit is read."""
    cases, failures = [], 0
    words = _threshold_words(document)
    open_layers = {o["layer"] for o in document["outcomes"] if o["status"] == "not tested"}
    for attack in _leaks(document):
        share = attack["share"]
        if share <= limit and attack["layer"] in open_layers:
            continue  # in vain is no success: the layer is listed below, as skipped
        name = quoteattr(printable(f"{attack['attack']} on {attack['layer']}"))
        text = f"{100 * share:.3g} % read {words}, allowed {100 * limit:.3g} %"
        if share > limit:
            failures += 1
            body = f"<failure message={quoteattr(text)}>{escape(printable(document['verdict']['text']))}</failure>"
        else:
            body = f"<system-out>{escape(text)}</system-out>"
        cases.append(
            f"<testcase classname={quoteattr(printable(document['model']['name']))} name={name}>{body}</testcase>"
        )
    skipped = [o for o in document["outcomes"] if o["status"] == "not tested"]
    for outcome in skipped:
        name = quoteattr(printable(f"every attack on {outcome['layer']}"))
        body = f"<skipped message={quoteattr(printable('not tested: ' + outcome['reason']))}/>"
        cases.append(
            f"<testcase classname={quoteattr(printable(document['model']['name']))} name={name}>{body}</testcase>"
        )
    head = f'<testsuite name="qbi audit" tests="{len(cases)}" failures="{failures}" skipped="{len(skipped)}">'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}{"".join(cases)}</testsuite>\n'
