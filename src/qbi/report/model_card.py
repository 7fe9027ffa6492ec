"""An audit as a section of a model card, in Markdown; the same text is a comment on a pull request."""

import re
from collections.abc import Mapping
from typing import Any

from qbi.errors import printable
from qbi.metrics import THRESHOLDS
from qbi.report.wording import threshold_words

MOST_ROWS = 12
"""Attacks in the table, the strongest first; the JSON has them all."""

MARKUP = re.compile(r"([\\`*_\[\]|~#!])")


def to_model_card(document: Mapping[str, Any]) -> str:
    """Verdict, what was read, what would help, what is doubtful, and how it was measured."""
    verdict, data, client = document["verdict"], document["data"], document["client"]
    threshold = next(t for t in THRESHOLDS if t.key == verdict["threshold"])
    words = threshold_words(threshold, data["kind"])
    lines = [
        "## Privacy of updates in federated learning",
        "",
        f"**{_plain(verdict['text'])}**",
        "",
        *_table(document, words),
        *_section("What would help", document["advice"]),
        *_section("Doubts", document["doubts"]),
        "### How it was measured",
        "",
        f"- Model: {_plain(document['model']['name'])}, {document['model']['parameters']:,} parameters.",
        f"- Data: {_plain(data['name'])}, {data['samples']:,} samples.",
        f"- Client: batches of {client['batch_size']}, {_steps(client['local_steps'])}, {_plain(client['loss'])}.",
        f"- {document['batches']} batches tried, seed {document['seed']}, "
        + ", ".join(f"{_plain(name)} {_plain(version)}" for name, version in document["versions"].items())
        + f", {document['date']}.",
        "",
        "An audit says what these attacks read. Where nothing was read, a stronger one may still read something.",
        "",
    ]
    return "\n".join(lines)


def _table(document: Mapping[str, Any], words: str) -> list[str]:
    """The attacks that read something; layers that were not tested, by name."""
    told = [
        {"attack": s["what"], "layer": s["layer"], "crafted": False, "share": s["share"]}
        for s in document["side_information"]
        if s["what"] == "tokens"
    ]
    read = sorted((a for a in [*document["attacks"], *told] if a["share"] > 0), key=lambda a: -a["share"])
    lines = []
    if read:
        lines += [f"| server | layer | model | read ({_plain(words)}) |", "|---|---|---|---:|"]
        for attack in read[:MOST_ROWS]:
            kind = "crafted" if attack["crafted"] else "as it is"
            name, layer = _plain(attack["attack"]), _plain(attack["layer"])
            lines.append(f"| {name} | {layer} | {kind} | {100 * attack['share']:.1f} % |")
        lines.append("")
    if len(read) > MOST_ROWS:
        lines += [f"{len(read) - MOST_ROWS} more rows stand in `audit.json`.", ""]
    untested = [o for o in document["outcomes"] if o["status"] == "not tested"]
    return lines + _section("Not tested", [f"{o['layer']}: {o['reason']}" for o in untested])


def _section(title: str, sentences: list[str]) -> list[str]:
    return [f"### {title}", "", *(f"- {_plain(s)}" for s in sentences), ""] if sentences else []


def _steps(count: int) -> str:
    return "one gradient an update" if not count else f"{count} local steps an update"


def _plain(text: str) -> str:
    """Names come from models and files: nothing in them is markup, a link, a mention or a new line."""
    one_line = " ".join(printable(str(text)).split())
    marked = MARKUP.sub(r"\\\1", one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    return marked.replace("@", "&#64;").replace("://", "&#58;//")
