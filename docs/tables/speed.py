"""Times."""

import statistics

from tables.reading import load, table


def _time(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


def bench(name: str) -> str:
    """`qbi bench` on one machine."""
    rows = [
        [
            r["task"],
            r["shape"],
            _time(r["ours_seconds"]),
            _time(r["naive_seconds"]),
            f"{r['ratio']:,.0f}" if r["ratio"] >= 10 else f"{r['ratio']:.2g}",
            ("extrapolated from " if r["naive_extrapolated"] else "") + r["note"],
        ]
        for r in load(name)["results"]
    ]
    return table(["task", "shape", "ours", "naive", "ratio", "naive measured as"], rows)


def aggp_step(name: str) -> str:
    """What AGGP adds to a step."""
    found = load(name)["aggp_step"]
    return f"{100 * found['share']:.1f} % ({1000 * found['added_seconds']:.2f} ms on {1000 * found['plain_seconds']:.1f} ms)"


def aggp_steps() -> str:
    """The same, measured many times on a GPU."""
    shares = load("aggp-h200")["shares"]
    return f"{statistics.median(shares):.1f} % (median of {len(shares)} runs, from {min(shares):.1f} to {max(shares):.1f}, {sum(s > 5 for s in shares)} of them above 5)"


def pairs_time(name: str) -> str:
    """PAIRS at ImageNet's size."""
    found = next(r for r in load(name)["results"] if r["task"] == "PAIRS" and r["shape"].startswith("ImageNet"))
    how = "an extrapolated " if found["naive_extrapolated"] else ""
    return f"{_time(found['ours_seconds'])}, {how}{found['ratio']:,.0f} times as fast as forward passes"


def audits() -> str:
    """Time and memory of an audit by size."""
    rows = [
        [f"{r['features']:,}", f"{r['neurons']:,}", f"{r['seconds']:.1f} s", f"{r['gib']:.1f} GiB"]
        for r in load("audit")["rows"]
    ]
    return table(["M", "N", "time", "peak memory of the process"], rows)


def large_audits() -> str:
    """Models at ImageNet's size."""
    rows = [[r["model"], f"{r['seconds']:.0f} s", f"{r['gib']:.1f} GiB", r["verdict"]] for r in load("audit")["large"]]
    return table(["model, 224×224", "time", "peak memory", "verdict"], rows)


def audit_times() -> str:
    """Audits that users waited for, beside what was aimed at."""
    rows = [
        [
            r["audit"],
            f"{r['seconds']:.1f} s",
            f"{r['aim']} s",
            "–" if r["gib"] is None else f"{r['gib']:.1f} GiB",
            r["verdict"],
        ]
        for r in load("audit-times")["rows"]
    ]
    return table(["audit", "time", "aim", "peak memory", "verdict"], rows)
