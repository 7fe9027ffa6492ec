"""The owner's file, `qbi-site.toml`: what may leave a site, for every framework. No server's configuration is asked.

policy = "update"                    # or "private": the training code uses qbi.Private
bits = 72                            # of `update`: for each round, about everything the site holds
clip = 1.0
limit = 1500                         # bits about this data set, over all rounds
ledger = "/var/lib/qbi/clinic.ledger"
data = "clinic"
metrics = ["accuracy:7"]             # numbers that may leave, each at its price
inspect = "refuse"                   # models that look crafted: refuse, warn or off
wait = 3600                          # seconds to wait for a reply
receipts = "/var/lib/qbi/receipts"   # of `private`: what was released, from the trainer's process to the gate's
log = "/var/lib/qbi/site.log"        # why something did not leave
reviewed = ["sha256:…"]              # NVFlare: code of jobs that the owner has read
"""

import os
import stat
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qbi.errors import BadValue, DataError, first_line, printable
from qbi.private.site import PREFIX, SiteSettings

VARIABLE = "QBI_SITE"
"""Names the file where a program is not told it otherwise."""

NAMES = frozenset(
    "policy bits clip limit ledger data metrics inspect wait receipts log reviewed".split()  # noqa: SIM905
)
WAIT = 3600.0
LONGEST = 1000
"""Characters of a line in the log: names come from others."""


@dataclass(frozen=True)
class OwnersSite:
    """A site as its owner set it up."""

    path: Path
    settings: SiteSettings
    receipts: Path
    log: Path
    wait: float = WAIT
    reviewed: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: Path | str | None = None) -> "OwnersSite":
        """The file at `path`, or where the environment's QBI_SITE says; refused where others than its owner may write it."""
        said = str(path or os.environ.get(VARIABLE, ""))
        if not said:
            raise DataError(
                f"owner's file: say where qbi-site.toml lies, in the environment: {VARIABLE}=/etc/qbi/qbi-site.toml."
            )
        place = Path(said).absolute()
        _refuse_others(place)
        try:
            found = tomllib.loads(place.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
            raise DataError(f"{place}: it cannot be read ({first_line(problem)}).") from problem
        return cls._of(place, found)

    @classmethod
    def _of(cls, place: Path, found: dict[str, Any]) -> "OwnersSite":
        unknown = sorted(set(found) - NAMES)
        if unknown:
            raise BadValue(f"{place}: there is no setting {unknown[0]!r}; there are {', '.join(sorted(NAMES))}.")
        for name in ("policy", "ledger"):
            if name not in found:
                raise BadValue(f"{place}: {name} is missing; the owner states it, nothing is assumed.")
        for name in ("policy", "ledger", "data", "inspect", "receipts", "log"):
            if not isinstance(found.get(name, ""), str):
                raise BadValue(f"{place}: {name} is {found[name]!r}; it is a word in quotes.")
        words = found.get("metrics", [])
        reviewed = found.get("reviewed", [])
        if not all(isinstance(v, list) and all(isinstance(w, str) for w in v) for v in (words, reviewed)):
            raise BadValue(f'{place}: metrics and reviewed are lists of words, such as ["accuracy:7"].')
        own: dict[str, Any] = {n: found[n] for n in ("policy", "bits", "clip", "data", "inspect") if n in found}
        own |= {"metrics": " ".join(words), "ledger": str(place.parent / found["ledger"])}
        own |= {"total": found["limit"]} if "limit" in found else {}
        settings = SiteSettings.of({f"{PREFIX}{name}": value for name, value in own.items()})
        wait = found.get("wait", WAIT)
        numbers = {"bits": settings.bits, "clip": settings.clip, "limit": settings.total, "wait": wait}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise BadValue(f"{place}: {name} is {value!r}; it is a positive number.")
        return cls(
            place,
            settings,
            place.parent / found.get("receipts", "receipts"),
            place.parent / found.get("log", "qbi-site.log"),
            float(wait),
            frozenset(reviewed),
        )

    def note(self, sentence: str) -> None:
        """A line in the owner's log, which no framework reads. A log that cannot be written stops nothing, and lets nothing out."""
        said = " ".join(printable(sentence[:LONGEST]).splitlines())  # an app's words are one line, and no line of ours
        line = f"{datetime.now(UTC).isoformat(timespec='seconds')} {said}\n"
        try:
            handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(handle, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            pass


def _refuse_others(place: Path) -> None:
    """Whoever may write the file sets the policy."""
    try:
        found = place.stat()
    except OSError as problem:
        raise DataError(
            f"{place}: there is no such file ({problem.strerror}); the owner of the data writes it."
        ) from problem
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DataError(f"{place}: others may write it; it must belong to root or to this user: chmod go-w {place}.")
