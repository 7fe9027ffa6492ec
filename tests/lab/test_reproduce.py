"""`qbi reproduce` as a person runs it: killed, resumed, on several workers, rendered, looked at in a browser."""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command import qbi

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ITEM = ("reproduce", "synthetic", "--cells", "200x20,200x50", "--runs", "20")


def rows(folder):
    connection = sqlite3.connect(Path(folder) / "results.sqlite")
    return sorted(connection.execute("SELECT key, cell, result FROM cells"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = qbi(*ITEM, "--jobs", "1", "--out", "r", cwd=folder)
    assert done.returncode == 0, done.stderr
    return rows(folder / "r")


@pytest.mark.long
@pytest.mark.serial
def test_killed_ten_times_it_ends_with_the_same_results(tmp_path, uninterrupted):
    command = [sys.executable, "-c", "from qbi.cli import main; main()", *ITEM, "--jobs", "2", "--out", "r"]
    moments, kills = random.Random(0), 0
    while kills < 10:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=moments.uniform(1.4, 2.8))
            shutil.rmtree(tmp_path / "r")  # it got through: start afresh, the kills must hit something
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    last = qbi(*ITEM, "--jobs", "2", "--out", "r", cwd=tmp_path)
    assert last.returncode == 0, last.stderr
    assert rows(tmp_path / "r") == uninterrupted
    time.sleep(1.5)
    assert not _orphans(tmp_path)


def _orphans(folder):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder.resolve():
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.serial
@pytest.mark.long
def test_a_ray_cluster_gives_the_same_to_the_bit(tmp_path, uninterrupted):
    pytest.importorskip("ray", reason="the ray extra is not installed")
    done = qbi(*ITEM, "--engine", "ray", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "r") == uninterrupted


@pytest.mark.long
@pytest.mark.serial
def test_the_cells_of_a_lost_ray_worker_are_retried(tmp_path, uninterrupted):
    pytest.importorskip("ray", reason="the ray extra is not installed")
    command = [sys.executable, "-c", "from qbi.cli import main; main()", *ITEM, "--engine", "ray", "--out", "r"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    killed = None
    while killed is None and process.poll() is None:
        workers = _named("ray::compute")
        if workers:
            killed = workers[0]
            os.kill(killed, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert killed is not None, "no worker was ever seen"
    assert process.returncode == 0, errors
    assert rows(tmp_path / "r") == uninterrupted


def _named(name):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if name in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def small_data(tmp_path_factory):
    """Data in the published layouts, made up: enough for the smallest cells and every figure."""
    root = tmp_path_factory.mktemp("data")
    from qbi.data.photos import synthetic_photos

    photos = synthetic_photos(460, 32, seed=3)
    batch = np.concatenate([photos.labels.numpy()[:, None].astype(np.uint8), photos.pixels.flatten(1).numpy()], 1)
    (root / "cifar-10-batches-bin").mkdir()
    (root / "cifar-10-batches-bin/data_batch_1.bin").write_bytes(batch.tobytes())
    for i, photo in enumerate(photos.pixels[:60]):
        folder = root / f"imagenet/val/n{i % 5:02}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo.permute(1, 2, 0).numpy()).resize((224, 224)).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def reproduced(small_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduced")
    items = ("cifar10-recall", "synthetic", "figure-batch", "figure-active", "figure-passive", "figure-layernorm")
    done = qbi(
        "reproduce", *items, "figure-averaging", "--cells", "200x20", "--runs", "2", "--data", small_data, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return folder / "out/reproduce"


@pytest.mark.serial
def test_everything_is_rendered(reproduced):
    document = json.loads((reproduced / "reproduction.json").read_text())
    assert [table["name"] for table in document["tables"]] == ["cifar10-recall", "synthetic"]
    assert len(document["figures"]) == 5
    first = document["tables"][0]["rows"][0]
    assert first["label"] == "(200, 20)"
    assert first["entries"][1]["runs"] == 2
    assert first["entries"][1]["published"] == 75.7
    assert "| (200, 20) |" in (reproduced / "reproduction.md").read_text()
    assert r"\toprule" in (reproduced / "reproduction.tex").read_text()
    for figure in document["figures"]:
        assert Image.open(reproduced / "figures" / f"{figure['name']}.png").width > 300
    active = next(f for f in document["figures"] if f["name"] == "figure-active")["numbers"]
    for count, kept in zip(active["counts"], active["share_kept"], strict=True):
        if count == 1:
            assert kept == pytest.approx(0.25 * 0.01, rel=0.01)


@pytest.mark.serial
def test_rendering_again_computes_nothing(reproduced, qbi_here):
    before = (reproduced / "results.sqlite").stat().st_mtime_ns
    code, said = qbi_here("reproduce", "cifar10-recall", "--render", "--data", "nowhere", "--out", reproduced)
    assert code == 0, said
    assert (reproduced / "results.sqlite").stat().st_mtime_ns == before


@pytest.mark.serial
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_in_a_browser(reproduced, qbi_here):
    from playwright.sync_api import sync_playwright

    qbi_here("reproduce", "cifar10-recall", "figure-batch", "--render", "--out", reproduced)
    requests, problems = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto((reproduced / "reproduction.html").as_uri())
        assert page.locator("table").count() == 1
        assert page.locator("tbody tr").count() == 12
        assert page.locator("td.close, td.near, td.far").count() >= 3
        assert page.locator("img").evaluate_all("images => images.every(i => i.complete && i.naturalWidth > 0)")
        assert page.locator("img").count() == 1
        browser.close()
    assert problems == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.serial
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifar10-recall", "--data", "nowhere"], "not a folder"),
        (["imdb-recall"], "IMDB reviews is not here"),
        (["cifar10-recall", "--cells", "500x20", "--runs", "1"], "half of 460 samples is 230"),
        (["cifar10-recall", "--cells", "200by20"], "not of the form NxB"),
        (["synthetic", "--cells", "7x7"], "none of"),
        (["all-of-it"], "no item is called"),
        (["synthetic", "--direct", "--from-gradients"], "not both"),
        (["synthetic", "--runs", "0"], "--runs"),
    ],
)
def test_bad_input_keeps_what_is_there(small_data, reproduced, qbi_here, arguments, message):
    before = rows(reproduced)
    extra = [] if "--data" in arguments else ["--data", small_data]
    code, said = qbi_here("reproduce", *arguments, *extra, "--out", reproduced)
    assert code == 2
    assert message in " ".join(said.split())
    assert rows(reproduced) == before


@pytest.mark.serial
def test_results_of_other_data_are_not_mixed_in(small_data, reproduced, qbi_here, tmp_path):
    other = tmp_path / "data"
    shutil.copytree(small_data, other)
    batch = other / "cifar-10-batches-bin/data_batch_1.bin"
    batch.write_bytes(batch.read_bytes()[: 3073 * 450])
    code, said = qbi_here("reproduce", "cifar10-recall", "--cells", "200x20", "--data", other, "--out", reproduced)
    assert code == 2
    assert "made with other data" in " ".join(said.split())


@pytest.mark.serial
def test_damaged_data_are_named(small_data, qbi_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "data"
    shutil.copytree(small_data, bad)
    (bad / "imagenet/val/n00/fake.jpg").write_text("text")
    code, said = qbi_here("reproduce", "figure-averaging", "--data", bad)
    assert code == 2
    assert "fake.jpg" in said
    done = qbi("reproduce", "figure-averaging", "--data", bad, "--skip-bad", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "skipped 1 unreadable files" in done.stderr


def test_data_command_says_what_is_where(small_data, qbi_here, tmp_path):
    found = json.loads(qbi_here("data", "--data", small_data, "--json")[1])["found"]
    assert found["imdb"] is None
    assert found["cifar10"].endswith("cifar-10-batches-bin")
    assert "not found" in qbi_here("data", "--data", tmp_path)[1]
    assert qbi_here("data", "--data", tmp_path / "no")[0] == 2
    assert "figure-batch" in qbi_here("reproduce", "--list")[1]
