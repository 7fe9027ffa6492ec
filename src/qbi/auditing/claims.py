"""What a federation's privacy settings are worth: noise relative to the clip, bits, chances, ε with its scope over the stated rounds.

Each mechanism is taken as its framework's code runs it, not as its documentation calls it. The server is the adversary: noise that the
server adds protects from others, not from it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qbi.errors import BadValue
from qbi.theory import guarantees

GUESS = 0.01
"""The chance of a guess whose growth is said."""

WORTHLESS = 100.0
"""ε over all rounds above which a setting bounds no guess that anybody could make."""

DELTA = 1e-5
UPDATE = "everything a client holds"
SAMPLE = "one sample"


@dataclass(frozen=True)
class PrivacySetting:
    """A mechanism and its arguments, as they stand in somebody's files."""

    place: str
    mechanism: str
    arguments: Mapping[str, Any]
    remarks: tuple[str, ...] = ()
    runs: bool = True
    """Whether the framework ever calls it."""


@dataclass(frozen=True)
class Worth:
    """What a setting is worth. None stands for what cannot be said; infinity for no bound at all."""

    setting: PrivacySetting
    scope: str
    noise: float | None
    claimed: float | None
    epsilon: float | None
    epsilon_in_all: float | None
    delta: float
    bits: float | None
    chance: float | None
    rounds: int
    remarks: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether it runs, and anything is bounded that is worth the word, and as far as was claimed."""
        if not self.setting.runs or self.epsilon is None or self.epsilon_in_all is None:
            return False
        if not max(self.epsilon, self.epsilon_in_all) <= WORTHLESS:
            return False
        return self.claimed is None or self.epsilon <= self.claimed * (1 + 1e-6)

    def document(self) -> dict[str, Any]:
        """As plain data; infinity is written as a word."""
        numbers = {
            "noise relative to the clip": self.noise,
            "ε claimed": self.claimed,
            "ε a round": self.epsilon,
            "ε in all": self.epsilon_in_all,
            "bits in all": self.bits,
            "a guess of 1 % becomes": self.chance,
        }
        said = {n: ("unbounded" if v == math.inf else v) for n, v in numbers.items()}
        return {
            "place": self.setting.place,
            "mechanism": self.setting.mechanism,
            "about": self.scope,
            "rounds": self.rounds,
            "δ": self.delta,
            **said,
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True)
class Circumstances:
    """What the files do not say: how many rounds, how many parameters."""

    rounds: int = 1
    parameters: int | None = None


def worth(setting: PrivacySetting, circumstances: Circumstances) -> Worth:
    """What a setting is worth; raises for a mechanism that is not known."""
    try:
        judge = MECHANISMS[setting.mechanism]
    except KeyError:
        raise BadValue(f"claims: {setting.mechanism} is not known; there are {', '.join(MECHANISMS)}.") from None
    try:
        return judge(setting, circumstances)
    except KeyError as missing:
        raise BadValue(
            f"claims: {setting.place}: {setting.mechanism} without a number for {missing}; files are read, not run: write it as a number, or "
            "into the app's config."
        ) from missing
    except (TypeError, ValueError, ZeroDivisionError) as problem:
        raise BadValue(f"claims: {setting.place}: {setting.mechanism} cannot be judged ({problem}).") from problem


def _gaussian(
    setting: PrivacySetting, rounds: int, noise: float, delta: float, scope: str, claimed: float | None, *remarks: str
) -> Worth:
    return Worth(
        setting,
        scope,
        noise,
        claimed,
        guarantees.epsilon(delta, noise),
        guarantees.epsilon(delta, noise, rounds),
        delta,
        guarantees.bits(noise, rounds),
        guarantees.reconstruction(GUESS, noise, rounds),
        rounds,
        setting.remarks + remarks,
    )


def _nothing(setting: PrivacySetting, rounds: int, *remarks: str) -> Worth:
    """No noise: no bound, whatever was cut."""
    inf = math.inf
    return Worth(setting, UPDATE, 0.0, None, inf, inf, DELTA, inf, 1.0, rounds, setting.remarks + remarks)


def _local_dp(setting: PrivacySetting, c: Circumstances) -> Worth:
    """Flower's LocalDpMod: std = sensitivity·√(2 ln(1.25/δ))/ε on an update that is clipped to `clipping_norm`."""
    given = setting.arguments
    clip, sensitivity = float(given["clipping_norm"]), float(given["sensitivity"])
    claimed, delta = float(given["epsilon"]), float(given["delta"])
    noise = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / claimed / clip if claimed else math.inf
    said = []
    if sensitivity < clip:
        said.append(
            f"the sensitivity is {sensitivity:g} and the clip {clip:g}: an update moves by the clip, so the noise is {clip / sensitivity:,.0f} times too small"
            if sensitivity
            else "the sensitivity is 0: no noise is added"
        )
    if claimed > 1:
        said.append("the formula for the noise holds for ε below 1")
    said.append("noise from numpy's generator in floating point: its low bits can be read (Mironov 2012)")
    return _gaussian(setting, c.rounds, noise, delta, UPDATE, claimed, *said)


def laplace_bits(ratio: float) -> float:
    """At most this many bits through one value of size at most r·b with Laplace noise of scale b: log₂(r + e^(−r)).

    The sum's mean absolute value is |x| + b·e^(−|x|/b), and of all laws with that mean Laplace's has the largest entropy.
    """
    return math.log2(ratio + math.exp(-ratio))


def _svt(setting: PrivacySetting, c: Circumstances) -> Worth:
    """NVFlare's SVTPrivacy, by its own accountant: ε for the choice, and `noise_var` for every value that is uploaded."""
    given = setting.arguments
    fraction, chosen = float(given.get("fraction", 0.1)), float(given.get("epsilon", 0.1))
    said = ["single numbers (0-dimensional arrays) leave as they are", "noise from numpy's generator in floating point"]
    if c.parameters is None:
        said.insert(0, "ε grows with the number of parameters: give --parameters or --model")
        return Worth(
            setting, UPDATE, None, chosen, None, None, DELTA, None, None, c.rounds, setting.remarks + tuple(said)
        )
    uploaded = math.ceil(min(fraction, 1.0) * c.parameters)
    release = given.get("epsilon_release")
    released = float(release) if release is not None else uploaded * float(given.get("noise_var", 0.1))
    each = released / uploaded / 2
    total = chosen + released
    bits = min(total / math.log(2), chosen / math.log(2) + uploaded * laplace_bits(each))
    said.insert(
        0, f"“epsilon” is that of the choice; the {uploaded:,} values that are uploaded cost {released:,.6g} more"
    )
    chance = min(1.0, GUESS * math.exp(min(50.0, total * c.rounds)))
    return Worth(
        setting,
        UPDATE,
        1 / each,
        chosen,
        total,
        total * c.rounds,
        0.0,
        bits * c.rounds,
        chance,
        c.rounds,
        setting.remarks + tuple(said),
    )


def _opacus(setting: PrivacySetting, c: Circumstances) -> Worth:
    """Opacus: noise relative to the clip, Poisson batches of a rate, so many steps."""
    given = setting.arguments
    delta = float(given.get("delta", DELTA))
    noise, rate, steps = float(given["noise_multiplier"]), float(given["sample_rate"]), int(given["steps"])
    in_all = steps * c.rounds
    said = ["holds where batches are drawn by chance (Opacus' own loader does), and for the weights alone"]
    if not given.get("secure_mode", False):
        said.append("without secure_mode the noise comes from torch's generator in floating point")
    return Worth(
        setting,
        SAMPLE,
        noise,
        given.get("target_epsilon"),
        guarantees.poisson_epsilon(delta, noise, rate, steps),
        guarantees.poisson_epsilon(delta, noise, rate, in_all),
        delta,
        guarantees.bits(noise, rate * in_all),
        min(
            guarantees.poisson_reconstruction(GUESS, noise, rate, in_all),
            GUESS * math.exp(min(50.0, guarantees.poisson_epsilon(delta, noise, rate, in_all))) + delta,
        ),
        c.rounds,
        setting.remarks + tuple(said),
    )


def _cut(*remarks: str) -> Callable[[PrivacySetting, Circumstances], Worth]:
    return lambda setting, c: _nothing(setting, c.rounds, *remarks)


SERVERS = "the server adds the noise: it has every update before that, so against the server nothing is bounded"
MECHANISMS: dict[str, Callable[[PrivacySetting, Circumstances], Worth]] = {
    "LocalDpMod": _local_dp,
    "SVTPrivacy": _svt,
    "Opacus": _opacus,
    "PercentilePrivacy": _cut("it cuts and adds no noise: not formal", "single numbers leave as they are"),
    "ExcludeVars": _cut("what is not excluded leaves as it is"),
    "fixedclipping_mod": _cut("it only clips, to a length that the server sends", SERVERS),
    "adaptiveclipping_mod": _cut("it only clips, to a length that the server sends, and tells which", SERVERS),
    "secaggplus_mod": _cut("the server sees the sum of all clients, without noise; sybils take the cover away"),
    "DifferentialPrivacyClientSideFixedClipping": _cut(SERVERS),
    "DifferentialPrivacyClientSideAdaptiveClipping": _cut(SERVERS),
    "DifferentialPrivacyServerSideFixedClipping": _cut(SERVERS),
    "DifferentialPrivacyServerSideAdaptiveClipping": _cut(SERVERS),
}
