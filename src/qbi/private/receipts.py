"""What was released, told by the trainer's process to the process at the boundary: keyed digests in the owner's folder.

A receipt is a file whose name is a keyed digest of what the server sent, of what was released, and of where it was paid. It is written after
the bits were paid, and is good for one reply. The key lies in the same folder, readable for its owner alone.

What that is worth: a job that forgets the private step has no receipt, and another process cannot make one without the key. Code that runs
under the user who can read the key can sign what it likes. Against such code there is the policy `update`, which trusts no process.
"""

import hashlib
import hmac
import json
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from qbi.errors import DataError
from qbi.private.boundary import State
from qbi.private.owner import OwnersSite

KEY = "key"
BYTES = 32
OLDEST = 7 * 24 * 3600.0
"""Seconds after which a receipt that nobody redeemed is thrown away."""


@dataclass(frozen=True)
class Receipts:
    """The folder. Trainer and gate name the same one, in the owner's file."""

    folder: Path
    payee: str = ""
    """The ledger and the data set that paid, and the site's name where several are simulated together."""

    @classmethod
    def of(cls, site: OwnersSite, name: str = "") -> "Receipts":
        """A site's own. Sites that share an owner's file, as simulated ones do, need names of their own."""
        return cls(site.receipts, json.dumps([str(Path(site.settings.ledger).resolve()), site.settings.data, name]))

    def write(self, sent: State, *released: State) -> None:
        """One of these states, which say the same, was released after that model was sent. Earlier receipts for that model are
        void, whoever wrote them: which state to send must not be chosen."""
        self._clear()
        prefix = self._prefix(sent)
        try:
            for old in self.folder.glob(f"{prefix}-*"):
                old.unlink(missing_ok=True)
            for state in released:
                place = self.folder / f"{prefix}-{self._name(sent, state)}"
                os.close(os.open(place, os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError as problem:
            raise DataError(f"receipts {self.folder}: one cannot be written ({problem.strerror}).") from problem

    def redeem(self, sent: State, state: State) -> bool:
        """Whether there is a receipt; all for that model are used up by redeeming one, whoever comes first."""
        try:
            place = next(self.folder.glob(f"*-{self._name(sent, state)}"), None)
            if place is None:
                return False
            place.unlink()
            for other in self.folder.glob(f"{place.name.partition('-')[0]}-*"):
                with suppress(FileNotFoundError):
                    other.unlink()
        except FileNotFoundError:
            return False
        except OSError as problem:
            raise DataError(f"receipts {self.folder}: one cannot be redeemed ({problem.strerror}).") from problem
        return True

    def _prefix(self, sent: State) -> str:
        return hmac.new(self._key(), digest(sent) + self.payee.encode(), "sha256").hexdigest()[:32]

    def _name(self, sent: State, state: State) -> str:
        return hmac.new(self._key(), digest(sent) + digest(state) + self.payee.encode(), "sha256").hexdigest()

    def _key(self) -> bytes:
        place = self.folder / KEY
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.folder.stat()
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise DataError(
                    f"receipts {self.folder}: the folder must belong to this user and to nobody else: chmod 700."
                )
            if not place.exists():
                # Two processes may come at once: each writes its own, the first to arrive stays.
                mine = self.folder / f".{KEY}.{os.getpid()}"
                with os.fdopen(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                    file.write(os.urandom(BYTES))
                with suppress(FileExistsError):
                    os.link(mine, place)
                mine.unlink()
            key = place.read_bytes()
        except OSError as problem:
            raise DataError(
                f"receipts {self.folder}: the key cannot be read or made ({problem.strerror})."
            ) from problem
        if len(key) != BYTES:
            raise DataError(f"receipts {self.folder}: its key is damaged; delete the folder, and a new one is made.")
        return key

    def _clear(self) -> None:
        ages: dict[Path, float] = {}
        for place in self.folder.glob("*"):
            with suppress(OSError):  # another trainer may clear it at the same time
                ages[place] = place.stat().st_mtime
        for place, at in ages.items():
            if place.name != KEY and at < max(ages.values()) - OLDEST:
                place.unlink(missing_ok=True)


def digest(state: State) -> bytes:
    """Of names, types, shapes and values, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        head = f"{len(name)}:{name}:{value.dtype}:{tuple(value.shape)};"
        total.update(head.encode())
        if value.numel():
            total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.digest()
