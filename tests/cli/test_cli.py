"""The commands as a person runs them: in a process of their own, in an empty folder."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from command import qbi


@pytest.mark.long
@pytest.mark.timeout(600)  # a minute on a core of its own
def test_audit_does_the_main_job(tmp_path):
    done = qbi("audit", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "measured" in done.stdout
    document = json.loads((tmp_path / "out/audit/audit.json").read_text())
    found = next(a for a in document["attacks"] if a["attack"] == "QBI")
    measured, recovered = found["measured"], found["recovered_from_gradients"]
    assert measured["recall"] == pytest.approx(recovered["mse<1e-10"]["mean"], abs=1e-9)
    assert recovered["mse<1e-10"]["mean"] == pytest.approx(sum(map(len, found["recovered_samples"])) / 60)
    assert 0.4 < measured["recall"] < 1
    assert abs(found["predicted"]["precision"] - measured["precision"]) < 0.15
    assert found["limit"]["recall"] == pytest.approx(0.9778, abs=1e-4)
    assert document["layers"][0]["reach"] == "exact"
    assert Image.open(tmp_path / "out/audit/audit.png").width > 2 * 4 * 64
    assert (tmp_path / "out/audit/report.html").stat().st_size < 3_000_000
    assert "\r" not in done.stderr


def test_audit_is_deterministic_and_speaks_json(tmp_path, qbi_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = (
        "audit",
        "--size",
        12,
        "--attack",
        "qbi",
        "--neurons",
        40,
        "--batch-size",
        10,
        "--batches",
        2,
        "--layers",
        "fc1",
        "--no-decode",
        "--no-defences",
        "--json",
    )
    first, again = (json.loads(qbi_here(*arguments)[1]) for _ in range(2))
    first.pop("seconds"), again.pop("seconds")
    assert first == again
    assert first["attacks"][0]["attack"] == "QBI"


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_audit_with_normalisation(tmp_path, qbi_here, norm, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = qbi_here(
        "audit",
        "--size",
        16,
        "--norm",
        norm,
        "--batches",
        1,
        "--attack",
        "qbi",
        "--layers",
        "fc1",
        "--no-decode",
        "--no-defences",
        "--json",
    )
    assert code == 0, said
    document = json.loads(said)
    found = document["attacks"][0]
    assert found["recovered_from_gradients"]["mse<1e-10"]["mean"] == pytest.approx(
        found["measured"]["recall"], abs=0.06
    )
    assert found["measured"]["recall"] > 0.3
    assert document["layers"][0]["reach"] == ("exact" if norm == "batch" else "lossy")


def test_audit_of_a_folder_of_images_fails_above_a_threshold(tmp_path, qbi_here, monkeypatch):
    for i in range(12):
        Image.effect_noise((40, 30), 80).convert("RGB").save(tmp_path / f"{i}.png")
    arguments = (
        "audit",
        "--data",
        ".",
        "--size",
        24,
        "--batch-size",
        8,
        "--neurons",
        60,
        "--attack",
        "qbi",
        "--batches",
        1,
        "--layers",
        "fc1",
        "--no-decode",
        "--no-defences",
    )
    monkeypatch.chdir(tmp_path)
    assert qbi_here(*arguments, "--fail-above", 0.0)[0] == 1
    assert qbi_here(*arguments, "--fail-above", 1.0)[0] == 0


def test_predict_gives_the_published_row(tmp_path):
    done = qbi("predict", "--neurons", 200, "--batch-size", 20, "--features", 3072, "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert document["bias"] == pytest.approx(-91.167, abs=1e-3)
    rounded = [round(100 * document[key], 1) for key in ("active", "precision", "recall")]
    assert rounded == [64.2, 37.7, 97.8]
    table = qbi("predict", "--wanted", 0.9, "--exact", cwd=tmp_path)
    assert table.returncode == 0
    assert "neurons reach" in table.stdout


@pytest.mark.long
def test_compare_puts_attacks_against_defences(tmp_path):
    arguments = (
        "--attacks",
        "qbi,imprint",
        "--defences",
        "none,aggp,drop-close",
        "--batch-sizes",
        "40",
        "--batches",
        1,
    )
    done = qbi("compare", *arguments, "--neurons", 120, "--epochs", 1, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    recall = {(o["attack"], o["defence"]): o["recall"]["psnr>60"] for o in document["outcomes"]}
    assert recall["qbi", "none"] > 0.2
    assert recall["qbi", "aggp"] == recall["qbi", "drop-close"] == recall["imprint", "drop-close"] == 0
    assert recall["imprint", "none"] > recall["imprint", "aggp"] > 0
    exposed = {(o["attack"], o["defence"]): o["exposed"] for o in document["outcomes"]}
    assert exposed["qbi", "none"] > 0.2
    assert 0 < exposed["qbi", "aggp"] < 0.02
    assert exposed["qbi", "drop-close"] == 0
    assert all(0 < entry["accuracies"][0] < 1 for entry in document["accuracy"])
    assert Image.open(tmp_path / "out/compare/compare.png").width > 200
    assert "### B = 40" in (tmp_path / "out/compare/compare.md").read_text()


@pytest.mark.long
def test_bench_compares_in_one_run(tmp_path):
    done = qbi("bench", "--size", "cifar", "--repeats", 1, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {row["task"] for row in document["results"]} == {
        "PAIRS",
        "A, P, R",
        "AGGP",
        "reading by cascade",
        "reading by passive",
    }
    assert all(row["ratio"] > 0 for row in document["results"])
    assert json.loads((tmp_path / "out/bench.json").read_text()) == document


BAD = {
    "missing data": (["audit", "--data", "nowhere"], "nowhere does not exist"),
    "unreadable image": (["audit", "--data", "bad"], "fake.jpg: not a readable image"),
    "empty folder": (["audit", "--data", "empty"], "no readable image"),
    "batch larger than the data": (["audit", "--data", "one", "--size", "16"], "batch of 20 is larger"),
    "too little auxiliary data": (["audit", "--data", "few", "--attack", "pairs", "--batch-size", "2"], "auxiliary"),
    "no neurons": (["audit", "--neurons", "0"], "--neurons"),
    "batch of one": (["audit", "--batch-size", "1"], "--batch-size"),
    "negative batch": (["predict", "--batch-size", "-3"], "batch size is -3"),
    "theory of one": (["predict", "--batch-size", "1"], "batch size is 1"),
    "no features": (["predict", "--features", "0"], "features is 0"),
    "impossible wish": (["predict", "--wanted", "1.5"], "recall is 1.5"),
    "impossible bound": (["audit", "--fail-above", "3"], "--fail-above"),
    "bound that is no number": (["audit", "--fail-above", "nan"], "--fail-above"),
    "more photos than fit": (["audit", "--batch-size", "1000000"], "more than fit"),
    "unknown attack": (["audit", "--attack", "magic"], "magic"),
    "bad scale": (["audit", "--attack", "trap-weights", "--trap-scale", "2"], "scale is 2"),
    "no such device": (["audit", "--device", "abacus"], "abacus"),
    "unwritable place": (["audit", "--size", "16", "--out", "file/x"], "cannot be written"),
    "unknown command": (["fly"], "fly"),
    "unknown defence": (["compare", "--defences", "prayer"], "no defence is called 'prayer'"),
    "unknown attacker": (["compare", "--attacks", "magic"], "no attack is called 'magic'"),
    "no list of sizes": (["compare", "--batch-sizes", "many"], "no list of numbers"),
    "too little to compare": (["compare", "--data", "few", "--batch-sizes", "4"], "too few"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    for name, count in (("bad", 1), ("empty", 0), ("one", 1), ("few", 5)):
        (root / name).mkdir()
        for i in range(count):
            Image.new("RGB", (20, 20), (i, i, i)).save(root / name / f"{i}.png")
    (root / "bad/fake.jpg").write_text("text")
    (root / "file").write_text("")
    return root


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_gets_one_sentence_and_code_two(folder, qbi_here, arguments, message, monkeypatch):
    monkeypatch.chdir(folder)
    code, said = qbi_here(*arguments)
    assert code == 2, said
    assert message in " ".join(said.split())
    assert not (folder / "out").exists()


def test_a_mistake_leaves_no_traceback(tmp_path):
    done = qbi("audit", "--data", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_help_shows_examples(qbi_here):
    for command in (
        "audit",
        "predict",
        "bench",
        "calibrate",
        "compare",
        "diff",
        "inspect",
        "data",
        "replay",
        "reproduce",
        "ledger",
    ):
        assert f"qbi {command}" in qbi_here(command, "--help")[1]
    assert qbi_here("--version")[1].strip()


def test_importing_stays_light(tmp_path):
    code = "import sys, qbi, qbi.theory; assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
