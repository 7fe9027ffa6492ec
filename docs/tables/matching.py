"""What gradient matching and the patches of vision transformers give away."""

from typing import Any

from tables.reading import load, table

PUBLISHED = {("LeNet (Zhu)", 1, None, False): "18.00 ± 3.33"}
"""Geiping et al., arXiv 2003.14053, Table 1, untrained LeNet: the same descent, steps, rate and total variation; other images, 100 of them."""


def matching() -> str:
    """Batches of 1 to 8 images: PSNR beside a published value, and what is recognisable beside a guess."""
    return table(
        ["network", "B", "batches", "PSNR", "published", "recognisable, %", "a guess, %", "labels read, %", "seconds"],
        [_matched(r) for r in load("matching")["rows"]],
    )


def matching_provenance() -> str:
    """Where and with what the table was made."""
    return str(load("matching")["provenance"])


def _matched(r: dict[str, Any]) -> list[str]:
    kind = ", another image" if r["other"] else "" if r["bits"] is None else f", private step, {r['bits']:g} bits"
    spread = "" if r["deviation"] is None else f" ± {r['deviation']:.1f}"
    return [
        f"{r['network']}{kind}",
        str(r["batch_size"]),
        str(r["batches"]),
        f"{r['psnr']:.1f}{spread} dB",
        PUBLISHED.get((r["network"], r["batch_size"], r["bits"], r["other"]), "–"),
        _percent(r["recognisable"]),
        _percent(r["guess"]),
        _percent(r["labels"]),
        f"{r['seconds']:.0f}{'' if r['on_gpu'] else ' (CPU)'}",
    ]


def patches() -> str:
    """What is put together of batches, by servers that look on and by those that let one class speak."""
    return table(
        ["server", "network", "B", "updates", "exact, %", "at 60 dB, %", "recognisable, %", "proven, %", "a guess, %"],
        [
            [
                r["what"],
                "trained" if r["trained"] else "as initialised",
                str(r["batch_size"]),
                f"{r['updates']:.1f}".removesuffix(".0"),
                *(_percent(r[key]) for key in ("exact", "faithful", "recognisable", "proven", "guess")),
            ]
            for r in load("patches")["rows"]
        ],
    )


def patches_provenance() -> str:
    """Where and with what the table was made."""
    return str(load("patches")["provenance"])


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
