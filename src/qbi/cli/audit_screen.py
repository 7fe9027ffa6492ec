"""What an audit says on the screen."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from qbi.cli.common import console, percent, plain

if TYPE_CHECKING:
    from qbi.auditing import AuditResult


def show_audit(result: "AuditResult", out: Path) -> None:
    """Layers, measures, the verdict, and what to do."""
    from qbi.auditing.match import matching_in_words
    from qbi.report.wording import shares_in_words

    table = Table(title=plain(f"{result.model} on {result.data}, B = {result.client.batch_size}"))
    for name in ("layer", "reach", "neurons", "values", "behind it"):
        table.add_column(name, overflow="fold")
    for finding in result.layers:
        values = "–" if finding.carrier is None else str(finding.carrier.features)
        target = finding.target
        table.add_row(plain(finding.name), finding.reach, str(target.neurons), values, target.activation)
    console.print(table)
    measures = Table()
    for name in ("attack, layer", "", "A %", "P %", "R %"):
        measures.add_column(name, justify="left" if name in ("attack, layer", "") else "right")
    for attack in result.attacks:
        first = plain(f"{attack.attack}, {attack.layer}")
        lines = {"measured": attack.measured, "predicted for this batch": attack.predicted}
        for label, shares in (lines | {"limit on normal data": attack.limit}).items():
            if shares is not None:
                measures.add_row(first, label, *(percent(share) for share in shares.document().values()))
                first = ""
        levels = shares_in_words({threshold: i.mean for threshold, i in attack.recovered.items()}, result.kind)
        measures.add_row("", f"read from gradients: {levels}", "", "", "")
    for missing in result.untested:
        measures.add_row(plain(f"{missing.attack}, {missing.layer}"), "not tested", "–", "–", "–")
    console.print(measures)
    console.print(plain(result.verdict), style="bold", highlight=False)
    for side in result.side_information:
        console.print(
            plain(f"Also: {side.what}, {side.layer}: {percent(side.share)} % ({side.note})."), highlight=False
        )
    if result.matched is not None:
        console.print(plain(matching_in_words(result.matched)), highlight=False)
    for line in result.advice:
        console.print(plain(f"• {line}"), highlight=False)
    for line in result.doubts:
        console.print(plain(f"? {line}"), style="yellow", highlight=False)
    console.print(f"Report: {out / 'report.html'}   JSON: {out / 'audit.json'}   ({result.seconds:.1f} s)")
