"""NVFlare's simulator and real processes of a server and its sites; every process is ended, below a home of its own."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("nvflare")

from qbi.attacks import QBI, Reading, mount
from qbi.exposure import count_leaks
from qbi.extraction import difference_rounding, weight_difference
from qbi.federation.exposed import exposed_step
from qbi.integrations.nvflare import job_digest
from qbi.integrations.nvflare.deployment import LocalSites
from qbi.metrics import FAITHFUL, RECOGNISABLE, match
from qbi.randomness import generator
from qbi.records import Update

APP = Path(__file__).parent / "apps" / "nvflare"
pytestmark = [pytest.mark.serial, pytest.mark.long, pytest.mark.timeout(600)]
OPEN = 'policy = "private"\nmetrics = ["accuracy:7"]\ninspect = "warn"\nreviewed = ["*"]\n'


def made(how, folder, out, way, *rest, home):
    """A job exported, or run in the simulator, by a process of its own."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, APP / "make.py", how, folder, out, way, *rest]
    own = {"HOME": str(home), "PYTHONPATH": f"{APP}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    site = next((word.removeprefix("site=") for word in rest if word.startswith("site=")), None)
    environment = {**os.environ, **own, **({"QBI_SITE": site} if site else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return folder / way


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 100), nn.ReLU(), nn.Linear(100, 4))


def samples(part):
    return torch.randn(10, 192, generator=torch.Generator().manual_seed(part)), torch.arange(10) % 4


def crafted(folder):
    mounted = mount(net(), QBI(10), torch.randn(2, 192), generator(0, "test"))
    place = folder / "crafted.safetensors"
    save_file({n: v.contiguous() for n, v in mounted.model.state_dict().items()}, place)
    return mounted, place


def read(mounted, out, part, threshold):
    """Which of a site's samples its recorded reply gives away."""
    sent, back = load_file(out / "sent-0.safetensors"), load_file(out / f"site-{part}-0.safetensors")
    moved = weight_difference(sent, back)
    rounding = difference_rounding(mounted.target.weight.detach(), moved[f"{mounted.layer}.weight"])
    found = mounted.read(Update(moved, back, 0, float("nan")), Reading(rounding=rounding)).samples
    if not len(found):
        return set()
    return set(match(found, samples(part)[0], data_range=4.0)[threshold].recovered.nonzero()[:, 0].tolist())


def test_a_crafted_model_in_the_simulator(tmp_path):
    """Without a guard, replies give what the sites' own counts say; with one, not even something recognisable."""
    mounted, place = crafted(tmp_path)
    out = tmp_path / "open"
    made("simulate", tmp_path / "a", out, "plainly", f"crafted={place}", home=tmp_path)
    for part in (1, 2):
        leak = count_leaks(exposed_step(mounted.model, *samples(part), layers=["0"]).exposures[0])
        counted = set(leak.samples.nonzero()[:, 0].tolist())
        assert read(mounted, out, part, FAITHFUL) == counted
        assert len(counted) >= 5
    site = tmp_path / "qbi-site.toml"
    site.write_text(f'ledger = "sites.ledger"\n{OPEN}')
    guarded = tmp_path / "guarded"
    made("simulate", tmp_path / "b", guarded, "privately", f"crafted={place}", f"site={site}", home=tmp_path)
    for part in (1, 2):
        assert read(mounted, guarded, part, RECOGNISABLE) == set()
        meta = json.loads((guarded / f"site-{part}-0.json").read_text())["meta"]
        assert "accuracy" in meta
        assert "loss" not in meta


def arrived(out):
    return sorted(p.name for p in out.glob("site-*.safetensors"))


def test_jobs_that_do_not_train_privately_get_nothing_out(tmp_path):
    """A script without the guard, one that changes it in its own process, one that sends metrics, a job with filters of its own."""
    jobs = {
        "plainly": made("export", tmp_path / "1", tmp_path / "out-plainly", "plainly", home=tmp_path),
        "own": made("export", tmp_path / "2", tmp_path / "out-own", "plainly", "own", home=tmp_path),
        "patched": made("export", tmp_path / "3", tmp_path / "out-patched", "patched", "external", home=tmp_path),
        "metrics": made("export", tmp_path / "4", tmp_path / "out-metrics", "metrics", home=tmp_path),
        "privately": made("export", tmp_path / "5", tmp_path / "out-privately", "privately", "external", home=tmp_path),
    }
    with LocalSites(2, OPEN) as sites:
        ended = {name: sites.run(job, within=120) for name, job in jobs.items()}
        logs = [sites.log(name) for name in sites.names]
        processes = list(sites.processes.values())
    assert all(process.poll() is not None for process in processes)
    assert not sites.home.exists()
    assert ended["privately"] == "FINISHED:COMPLETED"
    assert arrived(tmp_path / "out-privately") == ["site-1-0.safetensors", "site-2-0.safetensors"]
    for name in ("plainly", "own", "patched", "metrics"):
        assert arrived(tmp_path / f"out-{name}") == []
        for place in (tmp_path / f"out-{name}").glob("site-*.json"):
            assert "4711" not in place.read_text()
    assert all("log streaming for" not in words for words in logs)


def test_unread_jobs_and_other_scopes_are_not_taken(tmp_path):
    job = made("export", tmp_path / "1", tmp_path / "out", "privately", home=tmp_path)
    other = made("export", tmp_path / "2", tmp_path / "out-other", "privately", home=tmp_path)
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps({**meta, "scope": "public"}))
    changed = made("export", tmp_path / "3", tmp_path / "out-changed", "privately", home=tmp_path)
    script = changed / "app" / "custom" / "script.py"
    script.write_text(script.read_text() + "\n# and something that the owner has not read\n")
    owners = OPEN.replace('"*"', f'"{job_digest(job / "app")}"')
    with LocalSites(2, owners) as sites:
        assert sites.run(changed, within=120) == "FINISHED:FAILED_TO_RUN"
        assert "not among those reviewed" in sites.site_file("site-1").with_name("qbi-site.log").read_text()
        assert sites.run(other, within=120) == "FINISHED:FAILED_TO_RUN"
        assert sites.run(job, within=120) == "FINISHED:COMPLETED"
    assert arrived(tmp_path / "out-changed") == arrived(tmp_path / "out-other") == []


def test_the_policy_update_holds_for_scripts_that_stay_as_they_are(tmp_path):
    mounted, place = crafted(tmp_path)
    job = made("export", tmp_path / "1", tmp_path / "out", "plainly", f"crafted={place}", home=tmp_path)
    with LocalSites(2, 'policy = "update"\nbits = 72\ninspect = "warn"\nreviewed = ["*"]\n') as sites:
        assert sites.run(job, within=120) == "FINISHED:COMPLETED"
    for part in (1, 2):
        assert read(mounted, tmp_path / "out", part, RECOGNISABLE) == set()
        assert "4711" not in (tmp_path / "out" / f"site-{part}-0.json").read_text()


def test_a_site_killed_in_mid_round_leaves_nothing_behind_and_hangs_nothing(tmp_path):
    job = made("export", tmp_path / "1", tmp_path / "out", "privately", "rounds=50", home=tmp_path)
    with LocalSites(2, OPEN + "limit = 1e9\n") as sites:
        ended = []
        waiting = threading.Thread(target=lambda: ended.append(_ending(sites, job)), daemon=True)
        waiting.start()
        deadline = time.monotonic() + 90
        while not arrived(tmp_path / "out") and time.monotonic() < deadline:
            time.sleep(0.3)
        assert arrived(tmp_path / "out")
        sites.kill("site-2")
        killed = sites.processes["site-2"]
        assert killed.poll() is not None
    waiting.join(timeout=60)
    assert all(process.poll() is not None for process in sites.processes.values())


def _ending(sites, job):
    try:
        return sites.run(job, within=60)
    except Exception as problem:  # the server was ended under it
        return repr(problem)


EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare-guarded" / "run.py"


@pytest.mark.parametrize("attack", ["", "qbi"], ids=["benign", "crafted"])
def test_the_example_as_processes(tmp_path, attack):
    """A benign server is answered in every round, one that sends a crafted model is not."""
    command = [sys.executable, EXAMPLE, "deployment", "--rounds", "2", "--attack", attack, "--out", tmp_path / "out"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    found = json.loads((tmp_path / "out" / "federation.json").read_text())
    assert (found["ended"] == "FINISHED:COMPLETED") is (attack == "")
    assert len(arrived(tmp_path / "out")) == (0 if attack else 4)
    assert all(site["answered"] is (attack == "") for site in found["sites"])
