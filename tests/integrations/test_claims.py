"""`qbi claims`: what settings in other people's files are worth, against closed forms and the frameworks' own code."""

import json
import math

import numpy as np
import pytest

from qbi.auditing.claim_files import rounds_in, settings_in
from qbi.auditing.claim_records import Circumstances, PrivacySetting
from qbi.auditing.claims import MECHANISMS, laplace_bits, worth
from qbi.errors import BadValue, DataError
from qbi.theory import guarantees

SVT = "nvflare.app_common.filters.svt_privacy.SVTPrivacy"


def job(folder, *filters, tasks=("train",), rounds=3):
    place = folder / "app" / "config"
    place.mkdir(parents=True)
    parts = [{"path": path, "args": arguments} for path, arguments in filters]
    client = {"format_version": 2, "task_result_filters": [{"tasks": list(tasks), "filters": parts}]}
    server = {"workflows": [{"id": "c", "path": "x.FedAvg", "args": {"num_rounds": rounds}}]}
    (place / "config_fed_client.json").write_text(json.dumps(client))
    (place / "config_fed_server.json").write_text(json.dumps(server))
    return folder


def flower(folder, call, **config):
    lines = [f"{name} = {value}" for name, value in config.items()]
    (folder / "pyproject.toml").write_text("[tool.flwr.app.config]\n" + "\n".join(lines))
    script = f"def f(context):\n    cfg = context.run_config\n    mod = {call}\n    return ClientApp(mods=[mod])\n"
    (folder / "client_app.py").write_text(script)
    return folder


def test_the_defaults_of_svt_spend_seventy_thousand_a_round(tmp_path):
    """FLIP#1145: a model of seven million parameters."""
    (setting,) = settings_in(job(tmp_path, (SVT, {})))
    found = worth(setting, Circumstances(3, 7_033_290))
    assert found.epsilon == pytest.approx(0.1 + 70_332.9)
    assert found.epsilon_in_all == pytest.approx(3 * 70_333)
    assert found.claimed == 0.1
    assert not found.holds


def test_the_frameworks_own_examples(tmp_path):
    """The numbers of the page: NVFlare's brats18 with differential privacy, its documentation's sample policy, Flower's fl-dp-sa."""
    network = 4_702_227  # parameters of the SegResNet that the example names
    arguments = {"fraction": 0.9, "epsilon": 0.001, "noise_var": 1.0, "gamma": 1e-4}
    folder = job(tmp_path / "brats18", (SVT, arguments), rounds=600)
    found = worth(settings_in(folder)[0], Circumstances(rounds_in(folder)[0], network))
    assert found.epsilon == pytest.approx(4_232_005, abs=1)
    assert found.rounds == 600
    sample = worth(PrivacySetting("", "SVTPrivacy", {"fraction": 0.1, "epsilon": 0.2}), Circumstances(1, network))
    assert sample.epsilon == pytest.approx(47_022.5, abs=1)
    app = tmp_path / "fl-dp-sa"
    app.mkdir()
    (app / "client_app.py").write_text("app = ClientApp(client_fn=f, mods=[secaggplus_mod, fixedclipping_mod])\n")
    (app / "server_app.py").write_text("strategy = DifferentialPrivacyClientSideFixedClipping(fedavg, 0.2, 10, 20)\n")
    judged = [worth(s, Circumstances()) for s in settings_in(app)]
    assert len(judged) == 3
    assert all(w.epsilon == math.inf and not w.holds for w in judged)


def test_svt_is_counted_as_its_own_code_counts():
    pytest.importorskip("nvflare")
    from nvflare.apis.dxo import DXO, DataKind, from_shareable
    from nvflare.apis.fl_context import FLContext
    from nvflare.app_common.filters.svt_privacy import SVTPrivacy

    for arguments in ({}, {"fraction": 0.6, "epsilon": 0.001, "noise_var": 1.0}, {"epsilon_release": 2.0}):
        shareable = DXO(DataKind.WEIGHT_DIFF, {"w": np.random.default_rng(0).normal(size=(30, 41))}).to_shareable()
        meta = from_shareable(SVTPrivacy(**arguments).process(shareable, FLContext())).meta
        found = worth(PrivacySetting("", "SVTPrivacy", arguments), Circumstances(1, 30 * 41))
        assert found.epsilon == pytest.approx(meta["svt_privacy_budget"]["epsilon_total"])


def test_a_sensitivity_far_below_the_clip_is_found(tmp_path):
    """FLIP#833: clip 1, sensitivity 1e-4."""
    call = 'LocalDpMod(cfg["clipping-norm"], cfg["sensitivity"], epsilon=float(cfg["epsilon"]), delta=1e-5)'
    config = {"num-server-rounds": 10, "clipping-norm": 1.0, "sensitivity": 1e-4, "epsilon": 10.0}
    folder = flower(tmp_path, call, **config)
    (setting,) = settings_in(folder)
    assert rounds_in(folder) == (10, True)
    found = worth(setting, Circumstances())
    assert found.noise == pytest.approx(4.845e-5, rel=1e-3)
    assert found.bits == pytest.approx(3.07e8, rel=0.01)
    assert any("10,000 times too small" in remark for remark in found.remarks)
    assert not found.holds


def test_local_dp_adds_the_noise_that_is_counted():
    pytest.importorskip("flwr")
    import torch

    from qbi.integrations.stock import flower_mod

    arguments = {"sensitivity": 0.3, "epsilon": 2.0, "delta": 1e-4}
    sent = {"w": torch.zeros(200, 300)}
    moved = flower_mod("LocalDpMod", clipping_norm=0.5, **arguments)(sent, {"w": torch.ones(200, 300)})["w"]
    found = worth(PrivacySetting("", "LocalDpMod", {"clipping_norm": 0.5, **arguments}), Circumstances())
    assert float(moved.std()) / 0.5 == pytest.approx(found.noise, rel=0.02)


def test_a_sound_local_setting_is_counted_and_defeated_by_one_nan(tmp_path):
    folder = flower(tmp_path, "LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=0.9, delta=1e-5)")
    (setting,) = settings_in(folder)
    found = worth(setting, Circumstances(5))
    assert found.epsilon == pytest.approx(guarantees.epsilon(1e-5, found.noise))
    assert found.epsilon_in_all > found.epsilon
    assert "NaN" in found.defeated
    assert not found.holds


@pytest.mark.parametrize("unused", [0.0, math.nan])
def test_what_is_said_of_nan_is_what_the_framework_does(unused):
    """A row of an embedding that no sample uses: with NaN in it the length is no number, and the update is not clipped."""
    pytest.importorskip("flwr")
    import torch

    from qbi.integrations.stock import flower_mod

    sent = {"embedding": torch.zeros(4, 8), "layer": torch.zeros(100, 10)}
    sent["embedding"][3] = unused
    trained = {**sent, "layer": 1e6 * torch.randn(100, 10, generator=torch.Generator().manual_seed(0))}
    mod = flower_mod("LocalDpMod", clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
    back = mod(sent, trained)["layer"]
    error = float((back - trained["layer"]).norm() / trained["layer"].norm())
    assert (error < 1e-3) == math.isnan(unused)


def test_filters_for_every_task_are_said_never_to_run(tmp_path):
    (setting,) = settings_in(job(tmp_path, (SVT, {}), tasks=("*",)))
    assert any("never runs" in remark for remark in setting.remarks)
    assert not setting.runs


def test_a_mod_that_no_app_has_and_a_number_of_two_values(tmp_path):
    script = tmp_path / "client_app.py"
    sound = "LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=0.9, delta=1e-5)"
    script.write_text(f"mod = {sound}\napp = ClientApp(mods=[mod])\n")
    assert next(iter(settings_in(tmp_path))).runs
    script.write_text(f"mod = {sound}\napp = ClientApp()\n")
    assert not next(iter(settings_in(tmp_path))).runs
    script.write_text(
        "epsilon = 100000.0\napp = ClientApp(mods=[LocalDpMod(1.0, 1.0, epsilon, 1e-5)])\n"
        "def other():\n    epsilon = 0.5\n"
    )
    with pytest.raises(BadValue, match="write it as a number"):
        worth(next(iter(settings_in(tmp_path))), Circumstances(1))


def test_nvflare_does_not_run_filters_for_every_task():
    """What the remark says, by NVFlare's own look-up."""
    pytest.importorskip("nvflare")
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.utils.task_utils import get_filters

    assert get_filters("task_result_filters", FLContext(), {"*/out": ["filter"]}, "train", "out") == []
    assert get_filters("task_result_filters", FLContext(), {"train/out": ["filter"]}, "train", "out") == ["filter"]


def test_a_sites_policy_is_read_scope_by_scope(tmp_path):
    scopes = [
        {
            "name": "a",
            "task_result_filters": [
                {"path": "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy", "args": {"percentile": 10}}
            ],
        },
        {
            "name": "b",
            "task_result_filters": [{"path": SVT, "args": {}}, {"path": "qbi.integrations.nvflare.SiteResults"}],
        },
    ]
    place = tmp_path / "privacy.json"
    place.write_text(json.dumps({"scopes": scopes, "default_scope": "a"}))
    found = settings_in(place)
    assert [s.mechanism for s in found] == ["PercentilePrivacy", "SVTPrivacy"]
    assert all(any("2 scopes" in remark for remark in s.remarks) for s in found)
    assert not worth(found[0], Circumstances()).holds
    assert worth(found[1], Circumstances()).epsilon is None  # without the number of parameters


def test_mods_that_clip_alone_bound_nothing(tmp_path):
    (tmp_path / "client_app.py").write_text("app = ClientApp(mods=[fixedclipping_mod, mod.adaptiveclipping_mod])")
    found = [worth(s, Circumstances()) for s in settings_in(tmp_path)]
    assert [w.setting.mechanism for w in found] == ["fixedclipping_mod", "adaptiveclipping_mod"]
    assert all(w.bits == math.inf and not w.holds for w in found)


@pytest.mark.parametrize("name", [n for n in MECHANISMS if n not in ("LocalDpMod", "Opacus")])
def test_every_mechanism_says_something(name):
    assert worth(PrivacySetting("here", name, {}), Circumstances()).remarks


@pytest.mark.parametrize("name", ["LocalDpMod", "Opacus"])
def test_a_number_that_no_file_says_is_asked_for(name):
    with pytest.raises(BadValue, match=r"here.*without a number"):
        worth(PrivacySetting("here", name, {}), Circumstances())


def test_the_bound_on_laplace_noise_holds_by_monte_carlo():
    """Information of a fair ± r through Laplace noise, by sampling: below the bound, and not far below."""
    draws = np.random.default_rng(0)
    for ratio in (0.05, 0.5, 3.0):
        x = draws.choice([-ratio, ratio], 400_000)
        y = x + draws.laplace(size=x.size)
        up, down = np.exp(-np.abs(y - ratio)), np.exp(-np.abs(y + ratio))
        own = np.where(x > 0, up, down)
        information = float(np.mean(np.log2(2 * own / (up + down))))
        assert information <= laplace_bits(ratio) + 0.005
    assert laplace_bits(0.0) == 0.0


def test_opacus_by_hand(qbi_here):
    code, said = qbi_here(
        "claims", "--noise-multiplier", 1.1, "--sample-rate", 0.01, "--steps", 100, "--rounds", 10, "--json"
    )
    (found,) = json.loads(said)["settings"]
    assert code == 0
    assert found["ε in all"] == pytest.approx(guarantees.poisson_epsilon(1e-5, 1.1, 0.01, 1000))


def test_the_command_on_files(tmp_path, qbi_here):
    code, said = qbi_here("claims", job(tmp_path, (SVT, {})), "--parameters", 7_033_290)
    assert code == 1
    assert "70,333" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("claims", "nowhere"), "no such file"),
        (("claims", "--noise-multiplier", "1"), "--sample-rate"),
        (("claims",), "no known mechanism"),
    ],
)
def test_what_cannot_be_judged_is_a_sentence(words, says, qbi_here):
    code, said = qbi_here(*words)
    assert code == 2
    assert says in said


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_damaged_files_are_a_sentence(tmp_path, text):
    (tmp_path / "privacy.json").write_text(text)
    with pytest.raises(DataError, match=r"privacy\.json"):
        settings_in(tmp_path)


@pytest.mark.parametrize("text", ['{"scopes": 3}', '{"task_result_filters": [3, {"filters": {}}]}', "[]", "{}"])
def test_odd_files_hold_nothing(tmp_path, text):
    (tmp_path / "privacy.json").write_text(text)
    assert settings_in(tmp_path) == []


def test_scripts_are_read_and_not_run(tmp_path):
    (tmp_path / "client.py").write_text("raise SystemExit(47)\nLocalDpMod(1.0, 1.0, 1.0, 1e-5)\n")
    assert len(settings_in(tmp_path)) == 1


REBOUND = {
    "added to": "EPS = 1.0\nEPS *= 1e6",
    "one of two": "EPS = 1.0\nEPS, other = 1e6, 1e-5",
    "annotated": "EPS = 1.0\nEPS: float = 1e6",
    "in a loop": "EPS = 1.0\nfor EPS in (1e6,): pass",
    "in passing": "EPS = 1.0\nif (EPS := 1e6): pass",
    "imported": "EPS = 1.0\nfrom settings import EPS",
    "a parameter": "EPS = 1.0\ndef make(EPS): ...",
    "everything imported": "EPS = 1.0\nfrom settings import *",
    "of the environment": "import os\nEPS = float(os.environ.get('epsilon', 1e6))",
    "of a dictionary": "S = {'epsilon': 1e6}\nEPS = S['epsilon']",
}


@pytest.mark.parametrize("how", REBOUND)
def test_a_name_that_may_stand_for_another_number_stands_for_none(tmp_path, how):
    (tmp_path / "pyproject.toml").write_text("[tool.flwr.app.config]\nepsilon = 1.0\n")
    (tmp_path / "client_app.py").write_text(
        f"{REBOUND[how]}\napp = ClientApp(mods=[LocalDpMod(1.0, 1.0, EPS, 1e-5)])\n"
    )
    (setting,) = settings_in(tmp_path)
    assert "epsilon" not in setting.arguments


HARMLESS = {"epsilon": 1, "epsilon_release": 1e-9}


def test_files_alone_never_end_with_zero(tmp_path, qbi_here):
    """The best that files can say: it would hold. Whether the lines are in force is not shown."""
    code, said = qbi_here("claims", job(tmp_path, (SVT, HARMLESS)), "--parameters", 1000)
    assert code == 3
    assert "not shown" in " ".join(said.split())


@pytest.mark.parametrize("path", ["corp.SVTPrivacy", "corp.Opacus", "corp.LocalDpMod"])
def test_a_filter_of_the_same_name_is_not_taken_for_the_stock_one(tmp_path, path):
    assert settings_in(job(tmp_path, (path, HARMLESS))) == []


@pytest.mark.parametrize("wrong", [{"epsilon_release": -0.5}, {"noise_var": -1e-9}, {"epsilon": math.nan}])
def test_numbers_that_the_filter_refuses_are_not_judged(wrong):
    with pytest.raises(BadValue, match="cannot be judged"):
        worth(PrivacySetting("here", "SVTPrivacy", wrong), Circumstances(1, 1000))


@pytest.mark.parametrize(
    "words",
    [
        ("--noise-multiplier", 0.45, "--sample-rate", 1, "--steps", 7),  # ε = 42: a guess of 1 % becomes certain
        ("--noise-multiplier", 1e-3, "--sample-rate", 1, "--steps", 1, "--delta", 0.9),
        ("--noise-multiplier", "nan", "--sample-rate", 0.01, "--steps", 100),
    ],
)
def test_numbers_by_hand_that_bound_nothing_do_not_end_with_zero(words, qbi_here):
    assert qbi_here("claims", *words)[0] in (1, 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [("b.py", "print 'x'"), ("b.py", "#" * 5_000_000), ("config_fed_client.conf", "task_result_filters = []")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=name):
        settings_in(tmp_path)


def test_the_largest_number_of_rounds_counts(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.flwr.app.config]\nrounds = 1\nnum-server-rounds = "50"\n')
    assert rounds_in(tmp_path) == (50, True)
    (tmp_path / "server_app.py").write_text("strategy.start(grid=grid, num_rounds=1000)\n")
    assert rounds_in(tmp_path) == (1000, True)


NETWORK = """from torch import nn
def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 60), nn.ReLU(), nn.Linear(60, 10))
"""


def test_what_servers_read_through_a_frameworks_own_filter(tmp_path, qbi_here):
    """PercentilePrivacy's defaults leave a crafted row's values, so as many are read as without it; SVT's noise leaves few."""
    pytest.importorskip("nvflare")
    (tmp_path / "net.py").write_text(NETWORK)
    percentile = "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy"
    folder = job(tmp_path / "job", (percentile, {}), (percentile, {"gamma": -1}), (SVT, {}))
    model = f"{tmp_path / 'net.py'}:make"
    words = ("--parameters", 1000, "--read", model, "--size", 12, "--batch-size", 8, "--json")
    code, said = qbi_here("claims", folder, *words)
    assert code == 1
    default, switched_off, sparse = (row["read"] for row in json.loads(said)["read"])
    assert default["qbi"]["psnr>19"] >= 4
    assert switched_off["qbi"]["psnr>19"] >= default["qbi"]["psnr>19"]
    assert sparse["qbi"]["psnr>30"] == 0


SOUND = {"epsilon": 1, "epsilon_release": 1e-9}


@pytest.mark.parametrize("how", ["as it should be", "at the server", "inward", "no task", "some kinds", "all kinds"])
def test_a_filter_that_does_not_see_what_leaves_does_not_hold(tmp_path, how):
    """Each of them was said to hold; by NVFlare's own code none of them touches the update."""
    arguments = {**SOUND, **({"data_kinds": ["WEIGHT_DIFF"]} if how == "some kinds" else {})}
    if how == "all kinds":
        arguments["data_kinds"] = ["WEIGHTS", "WEIGHT_DIFF"]
    chain = {"tasks": [] if how == "no task" else ["train"], "filters": [{"path": SVT, "args": arguments}]}
    if how == "inward":
        chain["direction"] = "in"
    name = "config_fed_server.json" if how == "at the server" else "config_fed_client.json"
    (tmp_path / name).write_text(json.dumps({"task_result_filters": [chain]}))
    (setting,) = settings_in(tmp_path)
    assert worth(setting, Circumstances(1, 1000)).holds is (how in ("as it should be", "all kinds"))


UNREAD = {
    "a dictionary of the same name": 'cfg = {"epsilon": 1e6}\napp = ClientApp(mods=[LocalDpMod(1.0, 1.0, cfg["epsilon"], 1e-5)])',
    "a pattern": "EPS = 1.0\nmatch 1e6:\n    case EPS: pass\napp = ClientApp(mods=[LocalDpMod(1.0, 1.0, EPS, 1e-5)])",
    "globals": 'EPS = 1.0\nglobals()["EPS"] = 1e6\napp = ClientApp(mods=[LocalDpMod(1.0, 1.0, EPS, 1e-5)])',
}


@pytest.mark.parametrize("text", UNREAD.values(), ids=UNREAD)
def test_numbers_that_may_be_others_are_not_read(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text("[tool.flwr.app.config]\nepsilon = 1.0\n")
    (tmp_path / "client_app.py").write_text(text)
    (setting,) = settings_in(tmp_path)
    assert "epsilon" not in setting.arguments


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class LocalDpMod(Base): ...", 0),
        ("from mine import LocalDpMod", 0),
        ("from .mods import LocalDpMod", 0),
        ("from flwr.clientapp.mod import LocalDpMod", 1),
        ("", 1),
    ],
)
def test_a_class_of_the_scripts_own_is_not_the_frameworks(tmp_path, text, found):
    (tmp_path / "client_app.py").write_text(f"{text}\napp = ClientApp(mods=[LocalDpMod(1.0, 1.0, 0.9, 1e-5)])\n")
    assert len(settings_in(tmp_path)) == found


def test_rounds_are_read_however_they_are_written(tmp_path, qbi_here):
    config = tmp_path / "pyproject.toml"
    (tmp_path / "client_app.py").write_text("app = ClientApp(mods=[LocalDpMod(1.0, 1.0, 0.9, 1e-5)])\n")
    for text, wanted in (
        ("1e3", (1000, True)),
        ('"²"', (None, False)),
        ("true", (None, False)),
        ("1000", (1000, True)),
    ):
        config.write_text(f"[tool.flwr.app.config]\nnum-server-rounds = {text}\n")
        assert rounds_in(tmp_path) == wanted
    said = json.loads(qbi_here("claims", tmp_path, "--rounds", 1, "--json")[1])
    assert (said["rounds"], said["rounds_stated"]) == (1000, True)
    config.unlink()
    (tmp_path / "server_app.py").write_text("N = input()\nstrategy.start(num_rounds=N)\nother.start(num_rounds=1)\n")
    assert rounds_in(tmp_path) == (1, False)
    assert not json.loads(qbi_here("claims", tmp_path, "--json")[1])["rounds_stated"]


def test_noise_beyond_all_measure_is_a_sentence(qbi_here):
    words = ("--noise-multiplier", "1e300", "--sample-rate", "0.01", "--steps", 100)
    code, said = qbi_here("claims", *words)
    assert code == 2
    assert "--noise-multiplier" in said
