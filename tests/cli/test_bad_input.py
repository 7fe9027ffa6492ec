"""What people feed a tool by mistake: one sentence with the remedy and exit code 2, or done right; never a traceback."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qbi.attacks.best_case import BestCase
from qbi.auditing import trial
from qbi.cli import FAULT, INTERRUPTED
from qbi.cli.audit import NOT_TESTED
from qbi.data.locating import FoundData
from qbi.data.text import load_text_csv
from qbi.lab.reproduce import prepared
from qbi.metrics import CLEAR
from qbi.private.ledger import Ledger
from qbi.randomness import generator
from qbi.report.audit import audit_page
from qbi.report.wording import SPREADS, threshold_words

NET = """
import torch
from torch import nn

def net(width=40, inputs=20):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 3))

def frozen():
    return net().requires_grad_(False)

def lazy():
    return nn.Sequential(nn.LazyLinear(40), nn.ReLU(), nn.Linear(40, 3))

def meta():
    with torch.device("meta"):
        return net()

def double():
    return net().double()

def half():
    return net().half()

def leaves():
    import sys
    sys.exit(0)

class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        import os
        self.inner = net()
        print("made")
        os.system("echo from another process")
    def forward(self, x):
        print("called", tuple(x.shape))
        return self.inner(x)

class Leaving(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
    def forward(self, x):
        raise SystemExit(0)
"""
TABLE = torch.randn(60, 20, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(60) % 3
QUICK = ("--attack", "qbi", "--batches", 1, "--batch-size", 4, "--no-defences", "--no-decode")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad input")
    (root / "net.py").write_text(NET)
    (root / "ends.py").write_text("import sys\nsys.exit(0)\n")
    arrays = {
        "table": {"x": TABLE, "y": LABELS},
        "no_y": {"x": TABLE},
        "integers": {"x": (10 * TABLE).long(), "y": LABELS},
        "negative": {"x": TABLE, "y": LABELS - 1},
        "constant": {"x": torch.ones(60, 20), "y": LABELS},
        "large": {"x": TABLE * 1e30, "y": LABELS},
        "point": {"x": torch.tensor(1.0), "y": torch.tensor(1)},
        "scalar": {"a": torch.tensor(1.0)},
        "tiny_layer": {"a.weight": torch.ones(3, 2), "a.bias": torch.ones(3)},
    }
    for name, found in arrays.items():
        np.savez(root / f"{name}.npz", **{key: value.numpy() for key, value in found.items()})
    torch.save({"f.weight": torch.eye(4).to_sparse(), "f.bias": torch.ones(4)}, root / "sparse.pt")
    torch.save({"f.weight": torch.ones(1).expand(10**6, 10**6), "f.bias": torch.ones(4)}, root / "wide.pt")
    with (
        zipfile.ZipFile(root / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        for _ in range(33):
            file.write(b"\0" * 2**26)
    (root / "file").write_text("")
    (root / "empty.ledger").write_bytes(b"")
    with sqlite3.connect(root / "foreign.ledger") as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
    (root / "slides").mkdir()
    (root / "slides/a.svs").write_text("slide")
    return root


def table(model, data="table.npz", *more):
    return ["audit", f"net.py:{model}", "--data", data, *QUICK, *more]


BAD = {
    "model file ends the process": (["audit", "ends.py:net"], "ends.py"),
    "inspected file ends the process": (["inspect", "ends.py:net"], "ends.py"),
    "callable ends the process": (["inspect", "net.py:leaves"], "net.py:leaves"),
    "forward ends the process": (table("Leaving"), "ends the process"),
    "nothing to inspect": (["inspect", "scalar.npz"], "nothing in it can be inspected"),
    "too narrow to inspect": (["inspect", "tiny_layer.npz"], "nothing in it can be inspected"),
    "nothing to render": (["reproduce", "--render", "--out", "out/none"], "nothing is stored"),
    "empty ledger": (["ledger", "empty.ledger"], "is no ledger"),
    "foreign ledger": (["ledger", "foreign.ledger"], "is no ledger"),
    "frozen model": (table("frozen"), "requires_grad"),
    "lazy model": (table("lazy"), "run it once on a sample"),
    "lazy inspected": (["inspect", "net.py:lazy"], "run it once on a sample"),
    "meta model": (table("meta"), "to_empty"),
    "meta inspected": (["inspect", "net.py:meta"], "to_empty"),
    "no targets": (table("net", "no_y.npz"), "y = x"),
    "point": (table("net", "point.npz"), "one row for each sample"),
    "negative labels": (table("net", "negative.npz"), "count classes from 0"),
    "constant samples": (table("net", "constant.npz"), "all the same"),
    "large values": (table("net", "large.npz"), "scale"),
    "zip bomb": (table("net", "bomb.npz"), "2 GiB"),
    "stretched tensor": (["inspect", "wide.pt"], "2 GiB"),
    "sparse tensor": (["replay", "sparse.pt"], "to_dense"),
    "absurd rate": (table("net", "table.npz", "--local-steps", 2, "--learning-rate", "1e308"), "--learning-rate"),
    "no rate": (["compare", "--learning-rate", "nan", "--epochs", 1], "--learning-rate"),
    "infinite gain": (["compare", "--gain", "inf"], "--gain"),
    "no defences": (["compare", "--defences", ""], "--defences"),
    "no attackers": (["compare", "--attacks", ""], "--attacks"),
    "no attacks": (["audit", "--attack", ","], "--attack"),
    "no networks": (["frontier", "--networks", ""], "--networks"),
    "no noises": (["frontier", "--noises", ""], "--noises"),
    "infinite limit": (["ledger", "some.ledger", "--limit", "nan"], "--limit"),
    "law of too many": (["predict", "--attack", "cascade", "--neurons", 100_000_000], "lower --neurons"),
    "law of too large": (["predict", "--attack", "qbi", "--batch-size", 10_000_000], "lower --neurons"),
    "slides": (["audit", "--data", "slides"], "such as a.svs"),
    "unwritable compare": (["compare", "--out", "file/x"], "file/x: it cannot be written"),
    "unwritable replay": (["replay", "nowhere.pt", "--out", "file/x"], "file/x: it cannot be written"),
    "unwritable calibrate": (["calibrate", "--out", "file/x"], "file/x: it cannot be written"),
    "unwritable frontier": (["frontier", "--out", "file/x"], "file/x: it cannot be written"),
    "unwritable bench": (["bench", "--out", "file/x.json"], "file/x.json: it cannot be written"),
    "unwritable plot": (["ledger", "nowhere", "--plot", "file/x.png"], "file/x.png: it cannot be written"),
    "unreachable cluster": (
        ["reproduce", "synthetic", "--engine", "ray", "--address", "127.0.0.1:1"],
        "cannot be reached",
    ),
    "cluster without its engine": (["reproduce", "synthetic", "--address", "127.0.0.1:1"], "--engine ray"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_one_sentence_and_code_two(place, qbi_here, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "__pycache__" not in str(path)}
    code, said = qbi_here(*arguments)
    assert code == 2, said
    assert message in " ".join(said.split())
    assert "Traceback" not in said
    after = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "__pycache__" not in str(path)}
    assert after == before


def test_a_ledger_is_not_begun_in_a_foreign_file(place):
    with pytest.raises(Exception, match="is no ledger"):
        Ledger(place / "foreign.ledger").spend("clinic", "model", 0.1)
    assert sqlite3.connect(place / "foreign.ledger").execute("SELECT name FROM sqlite_master").fetchall() == [
        ("songs",)
    ]


@pytest.mark.parametrize("kind", [OSError(39, "Directory not empty", "a", None, "b"), PermissionError(13, "no", "f")])
def test_a_failing_file_system_is_no_leak(qbi_here, monkeypatch, tmp_path, kind):
    def fails(*_arguments, **_more):
        raise kind

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qbi.auditing.loading.load_model", fails)
    code, said = qbi_here("audit", "net.py:net")
    assert code == 2
    assert "Traceback" not in said
    assert kind.strerror in said


def test_two_writers_prepare_the_same_data_once_each(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    meet, entered = threading.Barrier(2), []

    def prepare(_found, working, _skip, _progress):
        (working / "meta.json").write_text("{}")
        entered.append(working)
        meet.wait(20)

    monkeypatch.setattr(prepared, "_prepare_images", prepare)
    places: list = []
    writers = [
        threading.Thread(
            target=lambda: places.append(prepared.cache_data(FoundData("cifar10", source), tmp_path / "c"))
        )
        for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(entered) == 2
    assert len(places) == 2
    assert places[0] == places[1]
    assert [p.name for p in (tmp_path / "c").iterdir()] == [places[0].name]


@pytest.mark.long
def test_a_model_that_prints_leaves_json_whole(place, tmp_path):
    arguments = map(str, [*table("Loud"), "--json", "--out", tmp_path])
    done = subprocess.run(
        [sys.executable, "-m", "qbi", *arguments], cwd=place, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert "made" in done.stderr
    assert "from another process" in done.stderr
    assert "looking into the model\n" in done.stderr  # a line for each stage where nobody watches


@pytest.mark.parametrize(("model", "data"), [("double", "table"), ("half", "table"), ("net", "integers")])
def test_other_number_types_are_audited(place, qbi_here, monkeypatch, tmp_path, model, data):
    monkeypatch.chdir(place)
    code, said = qbi_here(*table(model, f"{data}.npz"), "--out", tmp_path)
    assert code == 0, said
    assert json.loads((tmp_path / "audit.json").read_text())["verdict"]["recall"] > 0.2
    assert "float32" in said


def test_binary_labels_must_be_zero_and_one(place, qbi_here, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    np.savez(tmp_path / "signs.npz", x=TABLE.numpy(), y=np.where(np.arange(60) % 2, 1, -1))
    (tmp_path / "one.py").write_text("from torch import nn\nnet = nn.Sequential(nn.Linear(20, 1))\n")
    code, said = qbi_here("audit", f"{tmp_path}/one.py:net", "--data", tmp_path / "signs.npz", *QUICK)
    assert code == 2
    assert "0 and 1" in said


def test_tables_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext,label\ngood,1\nbad,0\n")
    assert load_text_csv(tmp_path / "a.csv").texts == ("good", "bad")


def test_the_best_case_of_samples_that_are_all_the_same():
    same = torch.ones(50, 8)
    server = BestCase.knowing(same)
    torch.testing.assert_close(server.read(same[:3], 0.1, generator(0, "a")), same[:3])
    assert server.errors(same[:3], 0.1, generator(0, "a")).tolist() == [0, 0, 0]


@pytest.mark.long
def test_folders_of_tif_images(tmp_path, qbi_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans").mkdir()
    deep = np.random.default_rng(0).integers(0, 2**16, (8, 16, 16)).astype(np.uint16)
    for i in range(8):
        Image.fromarray(deep[i]).save(tmp_path / f"scans/{i}.tif")
    code, said = qbi_here("audit", "--data", "scans", "--size", 16, "--neurons", 20, *QUICK)
    assert code == 0, said
    from qbi.data.folder import load_image_folder

    pixels = load_image_folder(tmp_path / "scans").pixels
    assert np.abs(pixels[:, 0].numpy().astype(int) - deep // 256).max() <= 1


def test_built_in_photos_beside_a_folder_of_that_name(tmp_path, qbi_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    small = ("--size", 8, "--neurons", 20, *QUICK)
    for chosen in ((), ("--data", "builtin:photos")):
        code, said = qbi_here("audit", *small, *chosen)
        assert code == 0, said
    for command in (("audit", *small), ("compare",), ("calibrate",)):
        code, said = qbi_here(*command, "--data", "photos")
        assert code == 2
        assert "./photos" in said
        assert "builtin:photos" in said


def test_no_older_picture_stays_beside_a_new_report(place, qbi_here, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    (tmp_path / "audit.png").write_text("old")
    assert qbi_here(*table("net"), "--out", tmp_path)[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["audit.json", "report.html"]


def test_a_page_has_no_control_characters(place, qbi_here, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    qbi_here(*table("net"), "--out", tmp_path)
    document = json.loads((tmp_path / "audit.json").read_text())
    document["model"]["name"] = "a\x1b]0;b\x07\x9b\u202e"
    page = audit_page(document, command="qbi \x1b[31m", texts=[[("\x1bword", True)]])
    assert not set(page) & set("\x1b\x07\x9b\u202e")


def test_tables_of_numbers_speak_of_spreads_not_decibels(place, qbi_here, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    code, said = qbi_here(*table("net"), "--out", tmp_path)
    assert code == 0, said
    shown = " ".join(said.replace("│", " ").split())
    assert "1 batch of 4" in shown
    assert "1 attack." in shown
    assert "dB" not in shown
    assert "within 0.4, 13, 45 % of a feature's spread: " in shown
    page = (tmp_path / "report.html").read_text()
    assert "dB" not in page.split("<script")[0]
    assert "within 45 % of a feature&#39;s spread" in page


def test_spreads_are_those_that_samples_are_judged_in():
    assert SPREADS == trial.SPAN
    assert (
        threshold_words(CLEAR, "numbers")
        == f"within {100 * CLEAR.largest_error(trial.SPAN) ** 0.5:.2g} % of a feature's spread"
    )


def test_every_cell_of_the_report_is_readable_on_a_phone(place, qbi_here, monkeypatch, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next((p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), None)
    if chromium is None:
        pytest.skip("Chromium is not installed")
    monkeypatch.chdir(place)
    qbi_here("audit", "net.py:net", "--data", "table.npz", "--batch-size", 4, "--batches", 1, "--out", tmp_path)
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 375, "height": 800}).new_page()
        page.goto((tmp_path / "report.html").as_uri())
        cells = page.evaluate(
            "[...document.querySelectorAll('td')].filter(c => c.textContent.trim() && !c.closest('.printed')).map(c => {"
            "const range = document.createRange(); range.selectNodeContents(c);"
            "const box = range.getBoundingClientRect();"
            "return [box.left, box.right, c.textContent.trim().length, box.height, c.dataset.label]})"
        )
        width = page.evaluate("document.documentElement.scrollWidth")
        browser.close()
    assert width <= 375
    assert len(cells) > 20
    for left, right, letters, height, label in cells:
        assert 0 <= left < right <= 375, label  # nothing is cut off
        assert height <= 40 * (1 + letters / 12), label  # nor are letters piled up
        assert label


def test_groups_are_listed(qbi_here):
    said = qbi_here("reproduce", "--list")[1]
    assert "beyond " in said
    assert "figures " in said


def test_a_closed_pipe_is_no_leak(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "qbi", "predict", "--json"], cwd=tmp_path, stdout=writer, timeout=60, check=False
    )
    os.close(writer)
    assert done.returncode == 2


def test_every_exit_code_is_named():
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text()
    said = page.split("Exit codes:")[1].split("\n\n")[0]
    for code in (0, 1, 2, NOT_TESTED, FAULT, INTERRUPTED):
        assert re.search(rf"\b{code}\b", said), code
