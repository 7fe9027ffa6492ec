"""What goes wrong, in words a user can act on: the place, the value, the remedy.

The command line prints the sentence and exits with code 2; it never shows a traceback for these.
"""

import math
import re

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What steers a terminal or turns the direction of text; line ends and tabs are none of it."""


class QbiError(Exception):
    """Base of every error that the user, not the programmer, can mend.

    >>> import qbi
    >>> try:
    ...     qbi.Budget.for_goal(preset="perfect")
    ... except qbi.QbiError as problem:
    ...     print(type(problem).__name__)
    BadValue
    """


class BadValue(QbiError, ValueError):
    """A number or a setting that makes no sense, such as a batch of zero samples.

    >>> require_positive("audit", batch_size=0)
    Traceback (most recent call last):
    qbi.errors.BadValue: audit: batch size is 0; it must be at least 1.
    """


class CannotMount(QbiError):
    """A model on which the attack cannot stand; the message says why, and `at` names the layer that decides.

    >>> CannotMount("conv1: its outputs are fewer than the sample's values.", at="conv1").at
    'conv1'
    """

    def __init__(self, sentence: str, *, at: str = "") -> None:
        super().__init__(sentence)
        self.at = at


class CannotRead(QbiError):
    """An update out of which nothing can be read, such as one without bias gradients.

    >>> import qbi, torch
    >>> from qbi.carrier import Carrier
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False))
    >>> update = qbi.client_step(model, torch.ones(1, 4), torch.tensor([0]))
    >>> qbi.extract(model, "0", Carrier((4,), 4), update)
    Traceback (most recent call last):
    qbi.errors.CannotRead: 0.bias: the update has no gradient of this name; was this layer trained?
    """


class DataError(QbiError):
    """A file or a data set that is missing, damaged or too small.

    >>> from qbi.data.open import open_images
    >>> open_images("nowhere", size=32, count=8, seed=0)
    Traceback (most recent call last):
    qbi.errors.DataError: --data: nowhere does not exist. Give a folder or archive of images, or 'photos'.
    """


class MissingExtra(QbiError):
    """An optional dependency that is not installed.

    >>> print(MissingExtra("matplotlib", "lab"))
    matplotlib is not installed; it comes with an extra: pip install 'qbi[lab]'.
    """

    def __init__(self, module: str, extra: str) -> None:
        self.named = module, extra
        super().__init__(f"{module} is not installed; it comes with an extra: pip install 'qbi[{extra}]'.")

    def __reduce__(self) -> tuple[type["MissingExtra"], tuple[str, str]]:
        """So that a worker process can hand it on."""
        return type(self), self.named


def first_line(problem: BaseException, *, most: int = 160) -> str:
    """What an exception says, in one line; its kind where it says nothing."""
    said = str(problem).strip()
    return said.splitlines()[0][:most] if said else type(problem).__name__


def require_positive(place: str, **values: int) -> None:
    """Refuse counts below one, naming the place and the value."""
    for name, value in values.items():
        if value < 1:
            raise BadValue(f"{place}: {name.replace('_', ' ')} is {value}; it must be at least 1.")


def number_in(option: str, value: float, *, most: float = math.inf) -> None:
    """Refuse a setting that is not finite, not above zero, or absurdly large."""
    if not (math.isfinite(value) and 0 < value <= most):
        limit = "" if math.isinf(most) else f" and at most {most:,.0f}"
        raise BadValue(f"{option}: {value:g} is out of range; give a number above 0{limit}.")


def printable(text: str) -> str:
    """Without control characters: a file's own names must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def without_controls(text: str) -> str:
    """A page in which nothing steers a terminal that shows it; letters of every script stay."""
    return CONTROLS.sub("\ufffd", text)
