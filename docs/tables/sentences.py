"""What honest-but-curious servers read of text."""

from typing import Any

from tables.reading import load, table


def sentences() -> str:
    """Batches of 32 tokens: sequences, words and tokens that were read."""
    return table(
        ["model", "B", "exact sequences, %", "ROUGE-1", "ROUGE-2", "tokens in place, %", "different tokens, %"],
        [_row(r) for r in load("sentences")["rows"]],
    )


def _row(r: dict[str, Any]) -> list[str]:
    numbers = [f"{100 * r['exact']:.0f}", f"{r['rouge_1']:.2f}", f"{r['rouge_2']:.2f}"]
    numbers += [f"{100 * r['words']:.0f}", f"{100 * r['tokens']:.0f}"]
    if r["reason"] and not r["tokens"]:
        numbers = ["not decided", "–", "–", "–", "–"]
    return [f"{r['model']}, {r['what']}", str(r["batch_size"]), *numbers]
