"""The public names, the README's snippets, and an attack that comes from outside the package."""

import doctest
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import qbi
from command import qbi as run_qbi
from qbi.attacks import ATTACKS, Attack
from qbi.auditing import Client, audit
from qbi.data.photos import synthetic_photos
from qbi.detection.detectors import DETECTORS
from qbi.lab.calibrate import crafted_models
from qbi.lab.compare import Setting, judge
from qbi.metrics import FAITHFUL, THRESHOLDS
from qbi.records import Candidates, CraftedRows

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src/qbi").rglob("*.py"))


class Beacon(Attack):
    """A toy: rows with one weight; its reader gives back one fixed sample, so that nobody else's reader can pass for it."""

    key, name, action = "beacon", "beacon", "lights a beacon"

    def rows(self, neurons, features, generator):
        weight = torch.zeros(neurons, features, device=generator.device)
        weight[:, 0] = 1
        return CraftedRows(weight, torch.zeros(neurons))

    def read(self, sent, update, how):
        assert sent.attack is self
        samples = torch.full((1, sent.carrier.features), 7.0)
        return Candidates(samples, torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long))


@pytest.fixture
def beacon(monkeypatch):
    monkeypatch.setitem(ATTACKS, Beacon.key, Beacon)
    return Beacon.key


def test_an_attack_from_outside_is_audited_compared_and_calibrated(beacon):
    x = torch.randn(12, 30, generator=torch.Generator().manual_seed(0))
    x[0] = 7.0  # what its reader says, and nobody could guess
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3))
    result = audit(model, (x, torch.arange(12) % 3), attacks=[beacon], client=Client(10), defences=False)
    outcome = next(a for a in result.attacks if a.layer == "0")
    assert outcome.attack == "beacon"
    assert 0 < outcome.recall <= 0.1  # one candidate counts for one sample, in batches that hold one of them
    assert "(attack: beacon" in result.verdict
    photos = synthetic_photos(160, 8, seed=0)
    judged = judge(photos, beacon, "none", 10, Setting(neurons=20, batches=1))
    assert judged.attack == beacon
    assert judged.recall[FAITHFUL] == 0
    found = list(
        crafted_models(
            photos,
            nn.Sequential(nn.Flatten(), *nn.Sequential(nn.Linear(192, 128), nn.ReLU(), nn.Linear(128, 10))),
            "MLP",
            0,
        )
    )
    mine = [m for m in found if m.family == "beacon"]
    assert mine
    assert all(m.suspicion.keys() == DETECTORS.keys() for m in mine)


INNER = """
import torch
from torch import nn

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(60, 192) / 14)
        self.head = nn.Linear(60, 3)

    def forward(self, x):
        return self.head(torch.relu(torch.inner(x.flatten(1), self.weight)))
"""


@pytest.mark.long
def test_six_things_from_outside_are_used_through_the_command_line(tmp_path, qbi_here, monkeypatch):
    """An attack, a defence, a detector, a report format, a data source and a layer rule: an object and a line each."""
    (tmp_path / "net.py").write_text(INNER)
    plugin = ("--plugin", ROOT / "examples/plugin/own.py")
    small = ("--size", 8, "--batches", 1, "--batch-size", 6, "--no-defences", "--json")
    done = run_qbi(*plugin, "audit", "net.py:Inner", "--data", "my-noise", "--attack", "mine,passive",
                   "--format", "words", *small, cwd=tmp_path)  # fmt: skip
    known = json.loads(done.stdout)
    assert (tmp_path / "out/audit/verdict.txt").read_text().strip() == known["verdict"]["text"]
    assert known["accounts"]["weight"] == "leaks"
    assert any(a["attack"] == "Mine" for a in known["attacks"])
    alone = json.loads(run_qbi("audit", "net.py:Inner", *small, cwd=tmp_path).stdout)
    assert alone["accounts"]["weight"] == "not tested"
    done = run_qbi(*plugin, "inspect", "net.py:Inner", cwd=tmp_path)
    assert done.returncode == 1
    assert "large rows" in done.stdout
    done = run_qbi(*plugin, "compare", "--attacks", "mine", "--defences", "none,loud", "--batch-sizes", 8,
                   "--neurons", 20, "--epochs", 0, "--batches", 1, "--size", 8, "--json", cwd=tmp_path)  # fmt: skip
    found = {o["defence"]: o["recall"] for o in json.loads(done.stdout)["outcomes"]}
    assert found["none"][FAITHFUL.key] > found["loud"][FAITHFUL.key] == 0
    monkeypatch.chdir(tmp_path)
    assert qbi_here("--plugin", "nowhere", "audit")[0] == 2
    assert "--plugin: gone.py does not exist" in qbi_here("--plugin", "gone.py", "audit")[1]


def test_an_audit_and_a_private_step_need_no_extra(tmp_path):
    """Plots, text, Ray, Flower and data sets' hubs are not there, and the laboratory is never imported."""
    code = """
import sys
for name in ("matplotlib", "tokenizers", "ray", "flwr", "datasets"):
    sys.modules[name] = None
sys.argv = ["qbi", "audit", "--size", "12", "--neurons", "40", "--batch-size", "6", "--batches", "1", "--layers", "fc1", "--no-decode"]
import torch, qbi
model = torch.nn.Linear(4, 2)
private = qbi.Private(model, bits=72)
for x, y in private.batches((torch.randn(8, 4), torch.arange(8) % 2), batch_size=4):
    private.step(torch.optim.SGD(model.parameters(), lr=0.1), x, y)
from qbi.auditing import audit
assert not any(m.startswith("qbi.lab") for m in sys.modules), "the laboratory was imported"
from qbi.cli import main
for arguments in (sys.argv, ["qbi", "frontier", "--help"]):
    sys.argv = arguments
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/audit/report.html").exists()
    assert "Examples" in done.stdout


@pytest.mark.long
def test_every_attack_of_the_registry_gives_a_row(qbi_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = qbi_here("audit", "--attack", "all", "--size", 16, "--batches", 1, "--no-defences", "--no-decode")
    assert code == 0, said
    for attack in ATTACKS.values():
        assert f"{attack.name}, {'fc2' if attack.heads else 'fc1'}" in said
    code, said = qbi_here("audit", "--list-attacks")
    assert code == 0
    assert all(key in said for key in ATTACKS)


def test_no_module_branches_on_an_attack_or_a_threshold():
    """Keys stand with their attacks, thresholds with theirs; everybody else asks the object."""
    keys = [re.escape(a.key) for a in ATTACKS.values()] + [re.escape(a.name) for a in ATTACKS.values()]
    levels = [re.escape(t.key) for t in THRESHOLDS]
    named = "|".join([*keys, *levels])
    branch = re.compile(rf"""(==|!=|\bin\b|\[|get\(|isinstance\().*['"]({named})['"]""")
    wrong = []
    for path in SOURCES:
        room = path.relative_to(ROOT / "src/qbi").parts[0]
        if room in ("attacks", "metrics"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if branch.search(line) and not line.lstrip().startswith(("#", '"')):
                wrong.append(f"{path.name}:{number}: {line.strip()}")
    # The names of this package, and of a figure's random numbers, are no attack's.
    allowed = ('"ATTACKS", "PAIRS"', '"qbi": __version__', '["qbi"]', '"qbi": qbi', '"passive", BATCH', 'name="qbi"')
    assert [w for w in wrong if not any(a in w for a in allowed)] == []


def test_the_front_door_is_whole_and_light():
    assert sorted(qbi.__all__, key=str) == sorted(set(qbi.__all__), key=str)
    for name in qbi.__all__:
        found = getattr(qbi, name)
        assert found is not None
        if callable(found) and not isinstance(found, dict):
            assert found.__doc__, name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = qbi.nonsense
    assert not {"LeakGuard", "AmbientGuard"} & set(dir(qbi))  # gone: asked for, they say where to
    code = "import sys, qbi, qbi.cli.app; assert 'torch' not in sys.modules, 'torch'; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    done = subprocess.run([sys.executable, "-m", "qbi", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == qbi.__version__


def test_public_examples_run():
    """Every public function and class has an example, and the examples are true."""
    for name in qbi.__all__:
        found = getattr(qbi, name)
        assert not callable(found) or ">>>" in (found.__doc__ or ""), name  # constants: tests/docs/test_reference.py
    failed = attempted = 0
    for info in pkgutil.walk_packages(qbi.__path__, "qbi."):
        if "integrations" in info.name or info.name == "qbi.__main__" or info.name.startswith("qbi.kernels."):
            continue  # the last needs a GPU
        module = importlib.import_module(info.name)
        torch.manual_seed(0)
        result = doctest.testmod(
            module, extraglobs={"torch": torch, "nn": nn}, optionflags=doctest.NORMALIZE_WHITESPACE
        )
        failed, attempted = failed + result.failed, attempted + result.attempted
    assert failed == 0
    assert attempted > 40


def snippets():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


SETUP = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 4))
x, y = torch.randn(120, 40), torch.randint(4, (120,))
criterion = nn.CrossEntropyLoss()
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.long
def test_the_readmes_snippets_are_typed_and_run(tmp_path):
    assert len(snippets()) >= 3
    script = tmp_path / "readme.py"
    script.write_text(SETUP + "\n".join(snippets()))
    settings = ROOT / "pyproject.toml"
    done = subprocess.run(
        # With the project's own settings (strict), so that what `make check` analysed need not be analysed again.
        [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", ROOT / ".mypy_cache", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_in_the_documents_exists_with_its_options():
    import typer

    from qbi.cli.app import app

    commands = typer.main.get_group(app).commands
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        (page.name, line)
        for page in pages
        for line in re.findall(r"(?:^ {4}|`)(qbi [a-z][^`\n]*)", page.read_text(), re.MULTILINE)
    ]
    assert len(found) > 40
    for page, line in found:
        words = line.split("#")[0].split()
        assert words[1] in commands, f"{page}: {line}"
        known = {option for parameter in commands[words[1]].params for option in parameter.opts}
        unknown = {w.split("=")[0] for w in words if w.startswith("--")} - known - {"--help"}
        assert not unknown, f"{page}: {line}"
