"""NVFlare's filters of a site, job checks and file readers, in this process."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("nvflare")

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import ContentBlockedException
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.decomposers import common_decomposers, numpy_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

import qbi
from qbi.errors import DataError
from qbi.integrations.nvflare import ReviewedJobs, SiteData, SiteResults, job_digest, received, write_site
from qbi.integrations.nvflare.files import load_exchange
from qbi.private import Ledger
from qbi.private.owner import OwnersSite

X, Y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


SENT = {n: v.numpy() for n, v in make().state_dict().items()}
STOLEN = {n: np.full_like(v, 4711.25) for n, v in SENT.items()}
BLOCKED = make_reply(ReturnCode.EXECUTION_EXCEPTION)
"""What leaves of an error, and of whatever is blocked."""


def site(folder, text='policy = "private"\nmetrics = ["accuracy:7"]'):
    place = folder / "qbi-site.toml"
    place.write_text(f'ledger = "clinic.ledger"\n{text}')
    return place


def task():
    shareable = DXO(DataKind.WEIGHTS, dict(SENT)).to_shareable()
    shareable.set_header("current_round", 3)
    return shareable


def through(place, result, ask=None):
    context = FLContext()
    SiteData(str(place)).process(ask or task(), context)
    return SiteResults(str(place)).process(result, context)


def trained(place):
    model = FLModel(params={n: torch.from_numpy(v.copy()) for n, v in SENT.items()})
    with received(model, OwnersSite.read(place)) as here:
        net = make()
        net.load_state_dict(here.sent)
        private = qbi.Private(net, bits=18)
        for x, y in private.batches((X, Y), batch_size=16):
            private.step(torch.optim.SGD(net.parameters(), lr=0.1), x, y)
        return here.answer(private, {"accuracy": 0.5, "loss": 4711.25, "text": "4711"})


def test_a_private_round_leaves_with_named_metrics_and_nothing_else(tmp_path):
    place = site(tmp_path)
    answer = trained(place)
    answer.meta = {"secret": "4711", "NUM_STEPS_CURRENT_ROUND": 4711, "site_name": "4711"}
    result = FLModelUtils.to_shareable(answer)
    result.set_header("secret", 4711)
    result["secret"] = "4711"
    out = through(place, result)
    found = from_shareable(out)
    assert found.meta == {
        "NUM_STEPS_CURRENT_ROUND": 1,
        "initial_metrics": {"accuracy": pytest.approx(0.5039, abs=1e-4)},
    }
    assert "4711" not in repr({k: v for k, v in out.items() if k != "DXO"})
    assert out.get_header("current_round") == 3
    assert {n: v.tobytes() for n, v in found.data.items()} == {n: v.numpy().tobytes() for n, v in answer.params.items()}
    assert sum(e.bits for e in Ledger(tmp_path / "clinic.ledger").entries()) == pytest.approx(18 + 7 + 1)


def test_a_difference_of_weights_leaves_as_well(tmp_path):
    place = site(tmp_path)
    moved = {n: v.numpy() - SENT[n] for n, v in trained(place).params.items()}
    found = from_shareable(through(place, DXO(DataKind.WEIGHT_DIFF, moved).to_shareable()))
    assert found.data_kind == DataKind.WEIGHT_DIFF
    assert all(np.array_equal(v, moved[n]) for n, v in found.data.items())


KINDS = {
    "weights": DXO(DataKind.WEIGHTS, dict(STOLEN)),
    "difference": DXO(DataKind.WEIGHT_DIFF, dict(STOLEN)),
    "statistics": DXO(DataKind.STATISTICS, {"secret": 4711}),
    "analytic": DXO(DataKind.ANALYTIC, {"secret": 4711}),
    "app's own": DXO(DataKind.APP_DEFINED, {"secret": 4711}),
    "model": DXO(DataKind.FL_MODEL, {"params": dict(STOLEN)}),
    "collection": DXO(DataKind.COLLECTION, {"a": DXO(DataKind.WEIGHTS, dict(STOLEN))}),
    "no arrays": DXO(DataKind.WEIGHTS, {"0.weight": "4711"}),
    "objects": DXO(DataKind.WEIGHTS, {"0.weight": np.array(["4711"], dtype=object)}),
    "NaN": DXO(DataKind.WEIGHTS, {n: v * np.nan for n, v in STOLEN.items()}),
    "shapes": DXO(DataKind.WEIGHTS, {n: np.ones(4711) for n in STOLEN}),
    "empty": DXO(DataKind.WEIGHTS, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_other_kind_of_result_is_blocked_with_one_code(tmp_path, kind):
    assert through(site(tmp_path), KINDS[kind].to_shareable()) == BLOCKED
    assert "not answered" in (tmp_path / "qbi-site.log").read_text()


def test_what_is_no_exchange_object_is_blocked(tmp_path):
    assert through(site(tmp_path), Shareable({"secret": 4711})) == BLOCKED


@pytest.mark.parametrize("code", [ReturnCode.TASK_ABORTED, "4711", ReturnCode.EXECUTION_EXCEPTION])
def test_an_error_leaves_as_an_error_and_takes_nothing_with_it(tmp_path, code):
    result = DXO(DataKind.WEIGHTS, dict(STOLEN)).to_shareable()
    result.set_return_code(code)
    assert through(site(tmp_path), result) == BLOCKED


def test_metrics_leave_by_name_alone(tmp_path):
    result = DXO(DataKind.METRICS, {"accuracy": 0.5, "secret": 4711, "text": "4711"}, {"m": 4711}).to_shareable()
    found = from_shareable(through(site(tmp_path), result))
    assert found.data == {"accuracy": pytest.approx(0.5039, abs=1e-4)}
    assert found.meta == {}


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_the_policy_update_releases_whatever_came(tmp_path, kind):
    place = site(tmp_path, 'policy = "update"\nbits = 18')
    found = from_shareable(through(place, DXO(kind, dict(STOLEN)).to_shareable()))
    base = SENT if kind == DataKind.WEIGHTS else {n: np.zeros_like(v) for n, v in SENT.items()}
    moved = np.concatenate([(found.data[n] - base[n]).ravel() for n in SENT])
    assert np.linalg.norm(moved) < 5
    assert moved.std() == pytest.approx(0.2, rel=0.4)


@pytest.mark.parametrize("policy", ["private", "update"])
def test_a_trainer_that_changes_the_task_in_place_changes_nothing(tmp_path, policy):
    """Arrays that a script in the same process trains in place are the very ones that came."""
    place, ask, context = site(tmp_path, f'policy = "{policy}"\nbits = 18'), task(), FLContext()
    arrays = {n: v.copy() for n, v in SENT.items()}
    ask["DXO"]["data"] = arrays
    SiteData(str(place)).process(ask, context)
    for value in arrays.values():
        value += 4711.25
    result = DXO(DataKind.WEIGHTS, arrays).to_shareable()
    if policy == "private":
        assert SiteResults(str(place)).process(result, context) == BLOCKED
        return
    found = from_shareable(SiteResults(str(place)).process(result, context)).data
    assert max(float(np.abs(v).max()) for v in found.values()) < 5


def test_results_without_the_first_filter_are_blocked(tmp_path):
    place = site(tmp_path)
    result = DXO(DataKind.WEIGHTS, dict(SENT)).to_shareable()
    assert SiteResults(str(place)).process(result, FLContext()) == BLOCKED


def test_a_crafted_model_is_blocked_before_training(tmp_path):
    rows = np.random.default_rng(0).normal(size=(40, 64)).astype("f4")
    crafted = DXO(DataKind.WEIGHTS, {"0.weight": rows, "0.bias": np.full(40, -40, "f4")}).to_shareable()
    with pytest.raises(ContentBlockedException):
        SiteData(str(site(tmp_path))).process(crafted, FLContext())


# A site's folder


def job(folder, code="print(1)", config="{}"):
    app = folder / "app"
    (app / "config").mkdir(parents=True)
    (app / "custom").mkdir()
    (app / "config" / "config_fed_client.json").write_text(config)
    (app / "config" / "config_fed_server.json").write_text("{}")
    (app / "custom" / "train.py").write_text(code)
    return app


def test_only_jobs_that_were_read_are_taken(tmp_path):
    app = job(tmp_path)
    place = site(tmp_path, f'policy = "private"\nreviewed = ["{job_digest(app)}"]')
    jobs = ReviewedJobs(str(place))
    assert jobs.validate(str(app)) == ("", {})
    (app / "config" / "config_fed_server.json").write_text("[1]")  # the server's own business
    assert jobs.validate(str(app)) == ("", {})
    for changed in ("custom/train.py", "config/config_fed_client.json", "custom/config_fed_server.json", "custom/x.so"):
        before = (app / changed).read_bytes() if (app / changed).exists() else None
        (app / changed).write_text("other")
        assert jobs.validate(str(app))[0]
        (app / changed).unlink()
        if before is not None:
            (app / changed).write_bytes(before)
    assert jobs.validate(str(app)) == ("", {})


def test_a_sites_folder_gets_one_scope_its_check_and_no_streams(tmp_path):
    streamer = {"id": "log", "path": "nvflare.app_common.logging.site_log_streamer.SiteLogStreamer", "args": {}}
    other = {"id": "other", "path": "nvflare.app_common.resource_managers.x", "args": {}}
    (tmp_path / "resources.json.default").write_text(json.dumps({"components": [streamer, other]}))
    write_site(tmp_path, site(tmp_path))
    privacy = json.loads((tmp_path / "privacy.json").read_text())
    resources = json.loads((tmp_path / "resources.json").read_text())
    assert len(privacy["scopes"]) == 1
    assert privacy["default_scope"] == privacy["scopes"][0]["name"]
    assert resources["components"] == [other]
    assert resources["allow_log_streaming"] is False
    assert resources["app_validator"]["path"].endswith("ReviewedJobs")


# Files


@pytest.fixture(autouse=True)
def _arrays_can_be_written():
    """What NVFlare does where a job starts."""
    common_decomposers.register()
    numpy_decomposers.register()


def test_exchange_files_are_read_and_run_nothing(tmp_path):
    DXO(DataKind.WEIGHTS, {**SENT, "large": np.zeros(4_000_000, "f4")}).to_file(str(tmp_path / "sent.dxo"))
    fobs.dumpf(FLModel(params=dict(SENT), metrics={"a": 1.0}), str(tmp_path / "model.fobs"))
    for name, expected in (("sent.dxo", 5), ("model.fobs", 4)):
        found = load_exchange(tmp_path / name)
        assert len(found) == expected
        assert all(np.array_equal(found[n].numpy(), v) for n, v in SENT.items())


@pytest.mark.parametrize("cut", [0, 5, 40, 300])
def test_a_damaged_exchange_file_is_a_sentence(tmp_path, cut):
    DXO(DataKind.WEIGHTS, dict(SENT)).to_file(str(tmp_path / "sent.dxo"))
    content = (tmp_path / "sent.dxo").read_bytes()
    (tmp_path / "cut.dxo").write_bytes(content[:cut])
    with pytest.raises(DataError):
        load_exchange(tmp_path / "cut.dxo")


def test_replay_reads_exchange_files(tmp_path, qbi_here):
    model = make()
    DXO(DataKind.WEIGHTS, dict(SENT)).to_file(str(tmp_path / "sent.dxo"))
    nn.functional.cross_entropy(model(X[:1]), Y[:1]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = {n: v.numpy() for n, v in model.state_dict().items()}
    DXO(DataKind.WEIGHTS, after).to_file(str(tmp_path / "back.dxo"))
    code, said = qbi_here("replay", tmp_path / "sent.dxo", tmp_path / "back.dxo", "--out", tmp_path / "out", "--json")
    assert code == 0
    assert json.loads(said)["layers"][0]["agree"] >= 1


def test_without_the_extra_the_import_says_which():
    code = "import sys; sys.modules['nvflare'] = None\nimport qbi.integrations.nvflare"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'qbi[nvflare]'" in done.stderr
