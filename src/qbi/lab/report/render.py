"""A document as terminal tables, Markdown, LaTeX and one HTML page that needs nothing else."""

import base64
from importlib.resources import files

from rich.console import Console
from rich.table import Table

from qbi.lab.report.document import Document, TableView, ValuePair

CLOSE, FAR = 1.0, 2.5
"""Differences up to the first are green, beyond the second red."""


def shade(entry: ValuePair) -> str:
    """How well a cell agrees: close, near, far, or unknown."""
    off = entry.difference
    if off is None:
        return "unknown"
    return "close" if abs(off) <= CLOSE else "near" if abs(off) <= FAR else "far"


def value(entry: ValuePair) -> str:
    """Ours with its half-width, as the paper prints it."""
    if entry.ours is None:
        return "–"
    width = f" ± {entry.ours.half_width:.2f}" if entry.ours.count > 1 else ""
    return f"{entry.ours.mean:.1f}{width}"


def cell(entry: ValuePair) -> str:
    """Ours, the paper's, the difference."""
    if entry.published is None:
        return value(entry)
    off = "" if entry.difference is None else f", {entry.difference:+.1f}"
    return f"{value(entry)} ({entry.published:g}{off})"


def print_document(document: Document, console: Console) -> None:
    """Tables on a terminal, coloured by agreement."""
    colours = {"close": "green", "near": "yellow", "far": "red", "unknown": "dim"}
    for table in document.tables:
        shown = Table(title=f"{table.title}: ours (paper, difference)", title_justify="left")
        shown.add_column("")
        for column in table.columns:
            shown.add_column(column, justify="right")
        for label, entries in table.rows:
            shown.add_row(label, *(f"[{colours[shade(e)]}]{cell(e)}[/]" for e in entries))
        console.print(shown)
        console.print(table.verdict, markup=False)
        if table.note:
            console.print(table.note, markup=False, style="dim")
        console.print()
    for figure in document.figures:
        console.print(f"{figure.title}: {figure.caption}", markup=False)


def to_markdown(document: Document, *, image_folder: str | None = None) -> str:
    """Markdown; figures are linked from a folder where one is given."""
    parts = [f"# {document.title}", ""]
    parts += [f"- {name}: {text}" for name, text in document.facts.items()]
    parts += ["", "Each cell: ours ± 95 % interval (the paper's value, difference), in percent.", ""]
    for table in document.tables:
        parts += [f"## {table.title}", "", "| | " + " | ".join(table.columns) + " |"]
        parts += ["|---|" + "---:|" * len(table.columns)]
        parts += [f"| {label} | " + " | ".join(map(cell, entries)) + " |" for label, entries in table.rows]
        parts += ["", table.verdict, *([table.note] if table.note else []), ""]
    for figure in document.figures:
        parts += [f"## {figure.title}", ""]
        if image_folder is not None and figure.image is not None:
            parts += [f"![{figure.title}]({image_folder}/{figure.name}.png)", ""]
        parts += [figure.caption, ""]
    return "\n".join(parts).rstrip() + "\n"


def to_latex(document: Document) -> str:
    """One booktabs table each, ours and the paper's side by side."""
    return "\n".join(_latex_table(table) for table in document.tables)


def _latex_table(table: TableView) -> str:
    lines = [
        r"\begin{table}[t]\centering",
        rf"\caption{{{_escape(table.title)}. Ours $\pm$ 95\,\% interval, the paper's value in parentheses.}}",
        r"\begin{tabular}{@{}l" + "r" * len(table.columns) + "@{}}",
        r"\toprule",
        " & ".join(["", *map(_escape, table.columns)]) + r" \\ \midrule",
    ]
    for label, entries in table.rows:
        cells = []
        for entry in entries:
            ours = value(entry).replace("±", r"$\pm$").replace("–", "--")
            cells.append(ours if entry.published is None else f"{ours} ({entry.published:g})")
        lines.append(" & ".join([_escape(label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}\end{table}", ""])


def _escape(text: str) -> str:
    return text.replace("%", r"\%").replace("_", r"\_").replace("&", r"\&")


def to_html(document: Document) -> str:
    """One self-contained page; pictures are inlined."""
    from jinja2 import Environment

    template = files("qbi.lab.report").joinpath("reproduction.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(shade=shade, value=value)
    pictures = {f.name: base64.b64encode(f.image).decode() for f in document.figures if f.image is not None}
    return environment.from_string(template).render(document=document, pictures=pictures)
