"""What a federation's privacy settings are worth: noise relative to the clip, bits, chances, ε with its scope over the stated rounds.

Each mechanism is taken as its framework's code runs it, not as its documentation calls it. The server is the adversary: noise that the
server adds protects from others, not from it.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from qbi.auditing.claim_records import (
    BY_NAN,
    DELTA,
    GUESS,
    MOST_DELTA,
    SAMPLE,
    UPDATE,
    Circumstances,
    PrivacySetting,
    Worth,
)
from qbi.errors import BadValue
from qbi.theory import guarantees


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
    """Flower's LocalDpMod: std = sensitivity·√(2 ln(1.25/δ))/ε on an update that is clipped to `clipping_norm`.

    Its clipping takes min(1, clip / length), which is 1 for a length that is no number, as Python's `min` has it.
    """
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
    if delta > MOST_DELTA:
        said.append(f"δ is {delta:g}: the chance that everything leaves")
    if claimed > 1:
        said.append("the formula for the noise holds for ε below 1")
    said.append("noise from numpy's generator in floating point: its low bits can be read (Mironov 2012)")
    said.append("metrics, configs and texts pass it as they are")
    said.append("ε is for this update or none; any two updates lie twice the clip apart")
    return replace(_gaussian(setting, c.rounds, noise, delta, UPDATE, claimed, *said), defeated=BY_NAN)


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
    if not 0 < released < math.inf or not 0 < chosen < math.inf:
        raise ValueError(f"its ε are {chosen:g} and {released:g}; NVFlare takes positive ones")
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
    if not 0 <= noise < math.inf or not 0 < rate <= 1 or not 0 < delta <= MOST_DELTA:
        raise ValueError(
            f"noise {noise:g}, rate {rate:g}, δ {delta:g}; noise is finite, rates lie in (0, 1], δ in (0, {MOST_DELTA:g}]"
        )
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
