"""Numbers that a client's owner lets out, by name, each at its price in bits."""

import math
from dataclasses import dataclass
from typing import Any

from qbi.errors import BadValue, QbiError


class NotReleased(QbiError):
    """Something that was about to leave was not released. The sentence is for the owner; the server gets a fixed one."""


@dataclass(frozen=True)
class AllowedNumber:
    """A number that the owner lets out: `let_out` for those at a price, `constant` for those that say nothing.

    Written `name` (as it is: 72 bits, of which 8 say what kind of value it is), `name:7` (a number from 0 to 1 in 7 bits), `name:7:10` (from 0 to 10), or `name=1` (always that
    number, whatever the client's code says: no bits).
    """

    bits: int | None = None
    top: float = 1.0
    constant: float | None = None
    """A whole number is an integer: of which type it comes must not depend on what the client's code gave."""

    def let_out(self, value: Any) -> tuple[Any, float]:
        """The value as it may leave, and the bits it costs."""
        if self.bits is None:
            return value, 8.0 * (1 + _size(value))
        if type(value) not in (int, float):
            raise NotReleased(
                "boundary: a named number of so many bits is a list, a text or bytes; name it without bits."
            )
        steps = 2**self.bits - 1
        share = 0.0 if math.isnan(value) else min(1.0, max(0.0, value / self.top))
        return round(share * steps) / steps * self.top, float(self.bits)


def read_names(text: str) -> dict[str, AllowedNumber]:
    """`"num-examples=1 accuracy:7 loss:8:10"` as rules.

    >>> read_names("accuracy:7")["accuracy"].let_out(0.5)
    (0.5039370078740157, 7.0)
    """
    out: dict[str, AllowedNumber] = {}
    for word in text.replace(",", " ").split():
        try:
            if "=" in word:
                name, number = word.split("=")
                if not math.isfinite(float(number)):
                    raise ValueError(number)
                fixed = float(number)
                out[name] = AllowedNumber(constant=int(fixed) if fixed.is_integer() else fixed)
                continue
            name, *rest = word.split(":")
            rule = AllowedNumber(int(rest[0]) if rest else None, float(rest[1]) if len(rest) > 1 else 1.0)
        except (ValueError, IndexError) as problem:
            raise BadValue(
                f"metrics: {word!r}; write name, name:bits, name:bits:largest or name=constant."
            ) from problem
        if (rule.bits is not None and not 1 <= rule.bits <= 32) or not 0 < rule.top < math.inf:
            raise BadValue(f"metrics: {word!r}; bits go from 1 to 32, the largest value is positive and finite.")
        out[name] = rule
    return out


def _size(value: Any) -> int:
    """Bytes that a value can say at most. Its kind is exact: subclasses say more than they hold. How many there are, and of which kind each is, says something too: an empty text costs as much as a number."""
    if type(value) in (bool, int):
        return max(8, (int(value).bit_length() + 7) // 8)
    if type(value) in (bytes, bytearray):
        return 8 + len(value)
    if type(value) is str:
        return 8 + len(value.encode())
    if type(value) in (list, tuple):
        return 8 + sum(1 + _size(v) for v in value)
    if type(value) is not float:
        raise NotReleased(
            f"boundary: a named value is a {type(value).__name__}; numbers, texts, bytes and lists of them may leave."
        )
    return 8
