"""Hostile and absurd input: one sentence, exit code 2, in little time and memory. Files are made here, never kept."""

import gzip
import os
import resource
import signal
import sqlite3
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib

import pytest
import torch
from safetensors.torch import save_file

from qbi.defences import defended_step
from qbi.errors import DataError
from qbi.lab.reproduce.store import Store

GIB = 2**30


def limited(*arguments, cwd, gib=2, timeout=60):
    """The command in a process of its own that may use so much memory, torch's own included."""

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (gib * GIB, gib * GIB))

    command = [sys.executable, "-m", "qbi", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False, preexec_fn=limit
    )


def one_sentence(done):
    assert done.returncode == 2, (done.returncode, done.stdout[-500:], done.stderr[-500:])
    assert "Traceback" not in done.stderr + done.stdout


def png(width, height):
    """A valid PNG of zeros: a few kilobytes, whatever its size."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packer, rows = zlib.compressobj(9), []
    line = b"\0" * (1 + 3 * width)
    for start in range(0, height, 4096):
        rows.append(packer.compress(line * min(4096, height - start)))
    rows.append(packer.flush())
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"".join(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(1, 4_000_000), (1_000_000, 1)])
@pytest.mark.long
def test_absurd_pictures(tmp_path, width, height):
    (tmp_path / "a.png").write_bytes(png(width, height))
    one_sentence(limited("audit", "--data", ".", cwd=tmp_path))


@pytest.mark.long
def test_bombs_are_not_unpacked(tmp_path):
    with (
        zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.png", "w", force_zip64=True) as file,
    ):
        for _ in range(300):
            file.write(b"\0" * 2**20)
    done = limited("audit", "--data", "a.zip", cwd=tmp_path)
    one_sentence(done)
    assert "unpacks to" in done.stderr
    with gzip.open(tmp_path / "b.tar.gz", "wb") as packed:
        info = tarfile.TarInfo("a.png")
        info.size = 2**33
        packed.write(info.tobuf())
        packed.write(b"\0" * 2**20)
    one_sentence(limited("audit", "--data", "b.tar.gz", cwd=tmp_path))


@pytest.mark.long
def test_many_rows_need_no_square_of_memory(tmp_path):
    """30,000 rows of 16 values: two megabytes, and 3.6 GB for all pairs."""
    save_file({"a.weight": torch.randn(30_000, 16), "a.bias": torch.randn(30_000)}, tmp_path / "a.safetensors")
    done = limited("inspect", "a.safetensors", cwd=tmp_path, timeout=200)
    assert done.returncode in (0, 1), done.stderr
    done = limited("replay", "a.safetensors", "--no-samples", cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr


FILES = {
    "cyclic.pt": lambda path: torch.save(cyclic(), path),
    "names.safetensors": lambda path: save_file({"x" * 200_000 + str(i): torch.zeros(1) for i in range(8)}, path),
    "empty.safetensors": lambda path: path.write_bytes(b""),
    "lies.safetensors": lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"),
}


def cyclic():
    inner: dict = {}
    inner["again"] = inner
    return inner


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", ["inspect", "replay"])
def test_hostile_checkpoints(name, command, tmp_path, qbi_here):
    FILES[name](tmp_path / name)
    code, said = qbi_here(command, tmp_path / name)
    assert code == 2, said
    assert "Traceback" not in said


CSVS = {
    "long": "text,label\n" + "a" * 200_000 + ",1\n",
    "no text": "text,label\nfine,1\n,0\n",
    "huge label": "text,label\n" + "\n".join(f"good words {i},{10**30 + i}" for i in range(4)) + "\n",
}


@pytest.mark.parametrize("name", CSVS)
def test_odd_tables_of_text(name, tmp_path, qbi_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text(CSVS[name])
    code, said = qbi_here("audit", "--data", "a.csv")
    assert code == 2, said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "--seed", 10**23),
        ("audit", "--neurons", 10_000_000),
        ("audit", "--size", 2000, "--batch-size", 5000),
        ("compare", "--batch-sizes", 10**6),
        ("reproduce", "--runs", 10**8),
    ],
)
def test_absurd_numbers(arguments, qbi_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = qbi_here(*arguments)
    assert code == 2, said
    assert "Traceback" not in said


def test_names_cannot_steer_the_terminal_nor_break_xml(tmp_path, qbi_here):
    bad = "a\x1b[31m[/red]b"
    save_file(
        {f"{bad}.weight": torch.randn(40, 64), f"{bad}.bias": torch.full((40,), -20.0)}, tmp_path / "m.safetensors"
    )
    code, said = qbi_here("inspect", tmp_path / "m.safetensors")
    assert code == 1
    assert "\x1b[31m" not in said
    assert "[/red]b" in said
    from xml.etree import ElementTree

    from qbi.report.audit import to_junit

    document = {
        "model": {"name": bad},
        "data": {"kind": "images"},
        "verdict": {"text": bad, "threshold": "mse<1e-10"},
        "attacks": [{"attack": "x", "layer": bad, "unit": "samples", "share": 1.0}],
        "outcomes": [{"layer": bad, "status": "not tested", "reason": bad}],
    }
    ElementTree.fromstring(to_junit(document, 0.0))


def test_damaged_results_files(tmp_path, qbi_here):
    folder = tmp_path / "out"
    folder.mkdir()
    with sqlite3.connect(folder / "results.sqlite") as connection:
        connection.execute("CREATE TABLE cells (key TEXT PRIMARY KEY, cell TEXT, result TEXT, seconds REAL)")
        connection.execute("INSERT INTO cells VALUES ('a', 'no json', '{}', 1)")
    code, said = qbi_here("reproduce", "synthetic", "--quick", "--cells", "200x20", "--out", folder)
    assert code == 2, said
    assert "Traceback" not in said
    assert "of another kind" in said


def test_a_results_file_damaged_past_its_header(tmp_path, qbi_here):
    path = tmp_path / "results.sqlite"
    store = Store(path)
    for number in range(400):
        store.put_fact(f"fact {number}", "x" * 200)
    store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    raw = bytearray(path.read_bytes())
    raw[4096:] = os.urandom(len(raw) - 4096)
    path.write_bytes(raw)
    code, said = qbi_here("reproduce", "synthetic", "--quick", "--cells", "200x20", "--out", tmp_path)
    assert code == 2, said
    assert "Traceback" not in said
    assert "move it away" in said


def test_a_full_disk_in_mid_run_is_one_sentence(tmp_path):
    """SQLite itself says so, as it would on a full disk; what was kept before stays readable."""
    store = Store(tmp_path / "results.sqlite")
    store.put_fact("kept", "yes")
    store.connection.execute("PRAGMA max_page_count = 12")
    with pytest.raises(DataError, match="the disk is full; free some space"):
        store.put_figure("large", os.urandom(1 << 20), {}, 1.0)
    assert store.facts() == {"kept": "yes"}


@pytest.mark.long
def test_an_earlier_runs_pictures_do_not_stay(tmp_path, qbi_here):
    out = tmp_path / "o"
    arguments = (
        "audit",
        "--size",
        8,
        "--neurons",
        20,
        "--batch-size",
        4,
        "--batches",
        1,
        "--attack",
        "qbi",
        "--no-defences",
        "--out",
        out,
    )
    qbi_here(*arguments)
    assert (out / "audit.png").exists()
    qbi_here(*arguments, "--no-samples")
    assert not (out / "audit.png").exists()


def test_a_bad_place_is_noticed_before_the_work(tmp_path, qbi_here, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("qbi.auditing.audit", lambda *_a, **_k: pytest.fail("the audit was run"))
    code, said = qbi_here("audit", "--out", tmp_path / "file" / "x")
    assert code == 2
    assert "cannot be written" in said


def test_a_fault_of_our_own_is_not_taken_for_a_leak(qbi_here, monkeypatch, tmp_path):
    monkeypatch.setattr("qbi.auditing.audit", lambda *_a, **_k: 1 / 0)
    code, said = qbi_here("audit", "--out", tmp_path)
    assert code == 70
    assert "a fault of qbi's own" in said
    monkeypatch.setattr("qbi.auditing.audit", _interrupted)
    code, said = qbi_here("audit", "--out", tmp_path)
    assert code == 130
    assert "nothing was written" in said


def _interrupted(*_arguments, **_options):
    raise KeyboardInterrupt


def test_wide_heads_and_many_tokens_cost_no_square():
    """10,000 classes and 4,096 positions under the counting policies: in memory that rows² would break."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 30_000))
    assert len(defended_step(model, torch.randn(8, 64), torch.arange(8), "auto").leaks) == 2
    wide = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    batch = torch.randn(16, 256, 64), torch.zeros(16)
    assert len(defended_step(wide, *batch, "report", loss=lambda out, _y: out.mean()).leaks) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("audit", "--size", "64"), "nothing was written"),
        (("reproduce", "synthetic", "--jobs", "1"), "the same command goes on from there"),
    ],
)
def test_ctrl_c_says_in_one_line_what_is_kept(arguments, said, tmp_path):
    out = ("--out", str(tmp_path / "out"))
    command = [sys.executable, "-m", "qbi", *arguments, *out]

    def listening():
        """A shell that starts the tests in the background lets them, and all they start, ignore Ctrl-C."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        preexec_fn=listening,
    ) as work:
        first = work.stderr.readline()  # the size of the job: from here on it is at work
        assert "samples" in first or "cells" in first
        work.send_signal(signal.SIGINT)
        rest = work.stderr.read()
    assert work.returncode == 130, rest
    assert said in rest
    assert "Traceback" not in rest
    assert not (tmp_path / "out" / "audit.json").exists()
