"""What honest-but-curious servers read of text."""

from typing import Any

from tables.reading import load, table


def sentences() -> str:
    """Batches of 32 tokens: sequences, words and tokens that were read."""
    return table(
        [
            "model",
            "B",
            "batches",
            "exact sequences, %",
            "ROUGE-1",
            "ROUGE-2",
            "tokens in place, %",
            "different tokens, %",
        ],
        [_row(r) for r in load("sentences")["rows"]],
    )


AIMS = {8: 0.95, 32: 0.80}
"""Exact sequences that we aimed at, by the size of a batch."""

HONEST = ("as initialised", "trained for 100 steps")


def sentences_aims() -> str:
    """What of them was reached: for each model, size and kind of weights."""
    rows = {
        (r["model"], r["batch_size"], r["what"].split(", ")[-1]): r
        for r in load("sentences")["rows"]
        if "LoRA" not in r["what"]
    }
    said = []
    for size, aim in AIMS.items():
        for model in ("BERT", "GPT-2"):
            found = [(weights, rows.get((model, size, weights))) for weights in HONEST]
            parts = [f"{weights} {_reached(row, aim)}" for weights, row in found]
            said.append(f"{model} at B = {size} {', '.join(parts)}")
    return "; ".join(said)


def _reached(row: dict[str, Any] | None, aim: float) -> str:
    if row is None:
        return "was not measured"
    return f"{'reaches' if row['exact'] >= aim else 'misses'} it with {100 * row['exact']:.0f} %"


def sentences_provenance() -> str:
    """Where and on what it was measured."""
    said: str = load("sentences")["provenance"]
    return said


def _row(r: dict[str, Any]) -> list[str]:
    numbers = [f"{100 * r['exact']:.0f}", f"{r['rouge_1']:.2f}", f"{r['rouge_2']:.2f}"]
    numbers += [f"{100 * r['words']:.0f}", f"{100 * r['tokens']:.0f}"]
    if r["reason"] and not r["tokens"]:
        numbers = ["not decided", "–", "–", "–", "–"]
    return [f"{r['model']}, {r['what']}", str(r["batch_size"]), str(r["batches"]), *numbers]
