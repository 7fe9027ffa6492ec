"""How long a new user's first steps take."""

from tables.reading import load, table


def first_steps() -> str:
    """Each step with its seconds, and what a section takes in all."""
    rows: list[list[str]] = []
    found = load("first-steps")["steps"]
    for section in dict.fromkeys(step["section"] for step in found):
        own = [step for step in found if step["section"] == section]
        rows += [[section, step["step"], f"{step['seconds']:.1f} s"] for step in own]
        rows.append(["", "**in all**", f"**{sum(step['seconds'] for step in own):.0f} s**"])
    return table(["", "step", "time"], rows)
