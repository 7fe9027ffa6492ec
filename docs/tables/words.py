"""The glossary, from the table that reports take their meanings from."""

from qbi.report.glossary import TERMS


def glossary() -> str:
    """A row for each word."""
    rows = "\n".join(f"| {term.word} | {term.meaning} |" for term in TERMS)
    return f"| word | what is meant |\n|---|---|\n{rows}\n"
