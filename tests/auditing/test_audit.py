"""The audit as a user meets it: right numbers, honest doubts, a report that works, nothing that gives data away."""

import html
import io
import json
import logging
import os
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import qbi as package
import zoo
from command import qbi
from qbi.attacks import QBI, mount
from qbi.auditing import Client, assembling, audit, image_samples
from qbi.auditing.replay import replay
from qbi.data.photos import synthetic_photos
from qbi.errors import BadValue, DataError
from qbi.federation import LocalTraining, client_step, local_update
from qbi.metrics import CLEAR, EXACT, RECOGNISABLE, match
from qbi.models import image_cnn, text_model
from qbi.randomness import generator

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/report.schema.json").read_text())
DRAWS = torch.Generator().manual_seed(0)
TABLE, LABELS = torch.randn(120, 20, generator=DRAWS), torch.randint(3, (120,), generator=DRAWS)


def tabular(seed=0):
    torch.manual_seed(seed)
    return zoo.tabular()


@pytest.mark.long
def test_the_papers_cnn_on_imagenet_agrees_with_the_tables(imagenet):
    """With narrower convolutions: the prefix is the identity in both, and this one is fast."""
    torch.manual_seed(0)
    model = image_cnn(imagenet.shape, 200)
    for name, (i, o) in {"conv1": (3, 4), "conv2": (4, 4), "conv3": (4, 3)}.items():
        setattr(model, name, nn.Conv2d(i, o, 3, padding=1, bias=False))
    result = audit(model, imagenet, attacks=["qbi"], batches=6, client=Client(20), defences=False)
    assert result.recall == pytest.approx(0.825, abs=0.05)
    assert result.worst.predicted.recall == pytest.approx(result.recall, abs=0.12)


def test_a_document_follows_the_published_schema():
    validator = Draft202012Validator(SCHEMA)
    for result in (
        audit(tabular(), (TABLE, LABELS), client=Client(10)),
        audit(zoo.Transformer(), (torch.randint(50, (40, 12)), LABELS[:40] % 2), client=Client(10), batches=1),
        audit(zoo.Mixer(), (torch.randn(40, 3, 16, 16), LABELS[:40]), client=Client(6), batches=1),
    ):
        validator.validate(json.loads(json.dumps(result.document())))


def test_the_same_seed_gives_the_same_audit():
    first, again = (
        audit(tabular(), (TABLE, LABELS), client=Client(10), batches=1, seed=5).document() for _ in range(2)
    )
    first.pop("seconds"), again.pop("seconds")
    assert first == again


def test_the_model_is_left_alone():
    model = tabular()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    mode = model.training
    audit(model, (TABLE, LABELS), client=Client(10))
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert model.training == mode


@pytest.mark.long
def test_every_attack_and_layer_can_be_asked_for():
    result = audit(
        zoo.mlp(),
        (torch.randn(300, 3, 16, 16, generator=DRAWS), torch.zeros(300, dtype=torch.long)),
        attacks=["passive", "qbi", "pairs", "trap-weights"],
        layers="all",
        client=Client(10),
    )
    assert {(a.attack, a.layer) for a in result.attacks} >= {
        (attack, layer) for attack in ("QBI", "PAIRS", "trap weights") for layer in ("1", "3")
    }
    named = audit(
        zoo.mlp(), (torch.randn(60, 3, 16, 16), torch.zeros(60, dtype=torch.long)), attacks=["qbi"], layers="3"
    )
    assert [a.layer for a in named.attacks] == ["3"]


def test_differences_of_weights_give_what_gradients_give():
    """One local step of SGD: the same samples, whatever the learning rate."""
    data = (torch.randn(200, 3, 8, 8, generator=DRAWS), torch.arange(200) % 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 100), nn.ReLU(), nn.Linear(100, 4))
    plain = audit(model, data, attacks=["qbi"], client=Client(10), defences=False)
    for rate in (0.5, 0.01):
        client = Client(10, local_steps=1, training=LocalTraining(learning_rate=rate))
        sent = audit(model, data, attacks=["qbi"], client=client)
        assert sent.worst.recovered[CLEAR].mean >= plain.worst.recovered[CLEAR].mean - 0.1
    many = audit(model, data, attacks=["qbi"], client=Client(10, local_steps=4), defences=False)
    assert many.recall < plain.recall


def test_one_step_of_sgd_is_the_gradient():
    model, x, y = tabular(), TABLE[:10], LABELS[:10]
    update = local_update(model, [(x, y)], LocalTraining("sgd", 0.1), seed=3)
    gradient = client_step(model, x, y, seed=3)
    for name, value in gradient.gradients.items():
        torch.testing.assert_close(update.gradients[name] / 0.1, value, rtol=1e-3, atol=2e-6)
    assert update.batch_size == 10


def test_coarse_numbers_are_doubted_and_not_called_exact():
    result = audit(tabular(), (TABLE, LABELS), attacks=["qbi"], client=Client(10, precision="bfloat16"), defences=False)
    assert result.recall == 0
    assert result.worst.recovered[RECOGNISABLE].mean > 0.3
    fine = audit(tabular(), (TABLE, LABELS), attacks=["qbi"], client=Client(10), defences=False)
    assert fine.recall > 0.5


DOUBTS = {
    "one batch": ({"batches": 1}, "Only 1 batch"),
    "few samples": ({"data": (TABLE[:12], LABELS[:12])}, "only 12 samples"),
    "repeated": ({"data": (TABLE[:1].repeat(40, 1) + 0, LABELS[:40]), "layers": "1"}, "are the same"),
    "no rectifier": (
        {"model": lambda: nn.Sequential(nn.Linear(20, 30), nn.LeakyReLU(0.9), nn.Linear(30, 3)), "layers": "0"},
        "lets 90 %",
    ),
    "no linear layer": (
        {"model": lambda: nn.Sequential(nn.LayerNorm(20)), "loss": "cross-entropy"},
        "no linear layer",
    ),
    "tracing fell back": (
        {"model": zoo.EmbeddingMLP, "data": (torch.randint(50, (60, 12)), LABELS[:60] % 2)},
        "followed by export",
    ),
}


@pytest.mark.parametrize(("change", "words"), DOUBTS.values(), ids=DOUBTS.keys())
def test_reasons_to_doubt_are_said(change, words):
    torch.manual_seed(0)
    model = change.get("model", tabular)()
    result = audit(
        model,
        change.get("data", (TABLE, LABELS)),
        client=Client(10),
        batches=change.get("batches", 3),
        layers=change.get("layers", "most exposed"),
        loss=change.get("loss", "auto"),
        defences=False,
    )
    assert any(words in doubt for doubt in result.doubts), result.doubts


def test_text_comes_back_as_words():
    from qbi.data.builtin_text import builtin_text
    from qbi.data.text import word_tokens

    data = word_tokens(builtin_text(), length=12, vocabulary=500)
    torch.manual_seed(0)
    result = audit(text_model(500, 12, 16, 100), data, attacks=["qbi"], client=Client(10), defences=False)
    assert result.kind == "text"
    read = [text for text, exact in zip(result.gallery.words, result.gallery.exact, strict=True) if exact]
    assert len(read) >= 3
    assert all(right for text in read for _, right in text)


def test_notebooks_get_a_picture_of_words():
    result = package.audit(tabular(), (TABLE, LABELS), client=Client(10), name="<b>x</b>")
    assert "<table>" in result._repr_html_()
    assert "<b>x" not in result._repr_html_()
    assert "can recover" in str(result)


HOSTILE = {
    "nan loss": ({"loss": lambda out, y: out.sum() * float("nan")}, "--loss: it is nan"),
    "loss that fails": ({"loss": lambda out, y: out.no_such_thing}, "--loss: it fails"),
    "loss of many numbers": ({"loss": lambda out, y: out}, "must return one number"),
    "unknown loss": ({"loss": "hope"}, "no loss is called 'hope'"),
    "too many classes": ({"data": (TABLE, LABELS + 5)}, "labels go up to 7"),
    "nan data": ({"data": (TABLE * torch.nan, LABELS)}, "NaN or infinite"),
    "small data": ({"data": (TABLE[:5], LABELS[:5])}, "larger than the data"),
    "other shape": ({"data": (TABLE[:, :7], LABELS)}, "forward pass fails"),
    "unequal": ({"data": (TABLE, LABELS[:7])}, "7 targets"),
    "unknown attack": ({"attacks": ["magic"]}, "no attack is called 'magic'"),
    "unknown layer": ({"layers": "nine"}, "no linear layer 'nine'"),
    "no auxiliary": ({"attacks": ["pairs"], "client": Client(60)}, "auxiliary data"),
}


@pytest.mark.parametrize(("change", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_bad_input_to_the_library_is_one_sentence(change, words):
    options = {"client": Client(10)} | {k: v for k, v in change.items() if k != "data"}
    with pytest.raises((BadValue, DataError), match=re.escape(words)):
        audit(tabular(), change.get("data", (TABLE, LABELS)), **options)


def test_nan_weights_are_refused():
    model = tabular()
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    with pytest.raises(BadValue, match=r"1.weight has NaN"):
        audit(model, (TABLE, LABELS), client=Client(10))


NET = """
import torch
from torch import nn

def make(width=50):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, width), nn.ReLU(), nn.Linear(width, 3))

def table():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))

def bad(out, y):
    return out.sum() * float("nan")

class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(20, 3)
    def forward(self, x):
        raise RuntimeError("sorry")

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(20, 64), nn.Linear(64, 3)
    def forward(self, x):
        return self.g(self.f(x).relu()) if float(x.detach().sum()) < 1e9 else self.g(self.f(x))

number = 7
"""


def namespace():
    names = {}
    exec(NET, names)
    return names


class Exploit:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("audit")
    (root / "net.py").write_text(NET)
    np.savez(root / "table.npz", x=TABLE.numpy(), y=LABELS.numpy())
    np.savez(root / "wide.npz", x=TABLE[:, :7].numpy(), y=LABELS.numpy())
    np.savez(root / "odd.npz", z=TABLE.numpy())
    np.savez(root / "pickled.npz", x=np.array([Exploit()], dtype=object))
    save_file({"x": TABLE, "y": LABELS}, root / "table.safetensors")
    (root / "evil.pt").write_bytes(pickle.dumps({"x": Exploit()}))
    (root / "huge.safetensors").write_bytes(struct.pack("<Q", 2 * 2**30) + b"{}")
    torch.save({"f.weight": torch.full((4, 4), torch.nan), "f.bias": torch.zeros(4)}, root / "nan.pt")
    torch.save({"f.weight": torch.zeros(4, 4), "f.bias": torch.zeros(4)}, root / "same.pt")
    return root


@pytest.mark.long
def test_a_users_model_from_a_file(place, qbi_here, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = ("net.py:make", "--model-arg", "width=80", "--size", 16, "--batch-size", 8, "--no-decode", "--out", out)
    done = qbi("audit", *arguments, "--json", "--sarif", "--junit", "--fail-above", 1.0, cwd=place)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    Draft202012Validator(SCHEMA).validate(document)
    assert document["layers"][0]["neurons"] == 80
    assert document["verdict"]["recall"] > 0.3
    monkeypatch.chdir(place)
    assert qbi_here("audit", *arguments, "--fail-above", 0.1)[0] == 1
    sarif = json.loads((out / "audit.sarif").read_text())
    assert sarif["version"] == "2.1.0"
    assert {r["level"] for r in sarif["runs"][0]["results"]} == {"note"}
    assert "<testcase" in (out / "audit.xml").read_text()
    assert (out / "report.html").stat().st_size < 3_000_000
    assert Image.open(out / "audit.png").width > 100


def test_a_model_is_inspected_without_a_checkpoint(place, qbi_here, monkeypatch):
    monkeypatch.chdir(place)
    assert qbi_here("inspect", "net.py:make", "--model-arg", "width=30")[0] == 0
    assert qbi_here("inspect", "net.py:number")[0] == 2


def test_arrays_from_files(place, qbi_here, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    runs = [
        json.loads(
            qbi_here(
                "audit", "net.py:table", "--data", name, "--attack", "qbi", "--no-defences", "--out", tmp_path, "--json"
            )[1]
        )
        for name in ("table.npz", "table.safetensors")
    ]
    assert runs[0]["attacks"] == runs[1]["attacks"]
    assert runs[0]["data"]["kind"] == "numbers"


def test_without_samples_no_input_bytes_are_written(place, qbi_here, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    quick = ("--size", 16, "--attack", "qbi", "--no-defences", "--batches", 1)
    code, said = qbi_here("audit", "net.py:make", *quick, "--no-samples", "--sarif", "--junit", "--out", tmp_path)
    assert code == 0, said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["audit.json", "audit.sarif", "audit.xml", "report.html"]
    page = (tmp_path / "report.html").read_text()
    assert "data:image/png" not in page
    assert "not read" not in page
    with_samples = tmp_path / "with"
    qbi_here("audit", "net.py:make", *quick, "--out", with_samples)
    assert "data:image/png" in (with_samples / "report.html").read_text()


BAD = {
    "pickle as data": (["audit", "net.py:table", "--data", "evil.pt"], "evil.pt"),
    "pickle in npz": (["audit", "net.py:table", "--data", "pickled.npz"], "pickled.npz"),
    "huge header": (["audit", "net.py:table", "--data", "huge.safetensors"], "huge.safetensors"),
    "no x": (["audit", "net.py:table", "--data", "odd.npz"], "must be called x"),
    "wrong shape": (["audit", "net.py:table", "--data", "wide.npz"], "forward pass fails"),
    "forward raises": (["audit", "net.py:Raises", "--data", "table.npz"], "sorry"),
    "nan loss": (["audit", "net.py:table", "--data", "table.npz", "--loss", "net.py:bad"], "it is nan"),
    "no such module": (["audit", "no_such.module:net"], "is not found"),
    "no such file": (["audit", "nowhere.py:net"], "does not exist"),
    "no callable": (["audit", "net.py"], "names no callable"),
    "nothing of that name": (["audit", "net.py:nothing"], "nothing called 'nothing'"),
    "no model": (["audit", "net.py:number"], "not a model"),
    "bad argument": (["audit", "net.py:make", "--model-arg", "height=3"], "--model-arg"),
    "no pair": (["audit", "net.py:make", "--model-arg", "height"], "not of the form"),
    "arrays without model": (["audit", "--data", "table.npz"], "arrays need a model"),
    "replay of nothing": (["replay", "missing.pt"], "no such file"),
    "replay of an exploit": (["replay", "evil.pt"], "evil.pt"),
    "replay of nan": (["replay", "nan.pt"], "NaN or infinite"),
    "replay of the same": (["replay", "same.pt", "same.pt"], "are the same"),
    "replay of two models": (["replay", "same.pt", "table.safetensors"], "one side only"),
    "replay of a bad shape": (["replay", "same.pt", "nan.pt", "--shape", "3"], "--shape"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_to_the_command_is_one_sentence(place, qbi_here, arguments, message, monkeypatch):
    monkeypatch.chdir(place)
    code, said = qbi_here(*arguments)
    assert code == 2, said
    assert message in " ".join(said.split())
    assert not (place / "executed").exists()
    assert not (place / "out").exists()


def test_replay_reads_a_real_update_without_the_truth(qbi_here, tmp_path, monkeypatch):
    photos = image_samples(synthetic_photos(20, 16, seed=1))
    x = photos.inputs[0]
    torch.manual_seed(0)
    sent = mount(image_cnn((3, 16, 16), 150), QBI(20), x[:2], generator(0)).model
    after = {
        n: p - 0.1 * g
        for (n, p), g in zip(
            sent.named_parameters(), client_step(sent, x, photos.targets).gradients.values(), strict=True
        )
    }
    save_file({n: p.detach().contiguous() for n, p in sent.named_parameters()}, tmp_path / "sent.safetensors")
    torch.save({n: p.detach() for n, p in after.items()}, tmp_path / "back.pt")
    np.savez(
        tmp_path / "gradient.npz",
        *[
            client_step(sent, x, photos.targets).gradients[f"{layer}.{part}"].numpy()
            for layer in ("fc1", "fc2")
            for part in ("weight", "bias")
        ],
    )
    done = qbi("replay", "sent.safetensors", "back.pt", "--shape", "3,16,16", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["layers"][0]
    assert best["layer"] == "fc1"
    assert Image.open(tmp_path / "out/replay/replay.png").width > 100
    # The gradient file has no names and full precision: those that several rows agree on are likely samples; here all of them are.
    monkeypatch.chdir(tmp_path)
    layers = json.loads(qbi_here("replay", "gradient.npz", "--json")[1])["layers"]
    assert layers[0]["agree"] >= 3
    gradients = client_step(sent, x, photos.targets).gradients
    found = replay({n: gradients[n] for n in ("fc1.weight", "fc1.bias")})[0]
    sure = found.samples[found.support >= 2]
    assert match(sure, x.flatten(1))[EXACT].recovered.sum() == len(sure)


def page_of(result):
    from qbi.report.audit import audit_page

    return html.unescape(audit_page(result.document(), command="qbi audit"))


@pytest.fixture(scope="module")
def leaking():
    """An audit that finds a leak and has a remedy for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 60), nn.ReLU(), nn.Linear(60, 3))
    result = audit(model, image_samples(synthetic_photos(120, 16, seed=0)), client=Client(10))
    assert result.status == "leaks"
    return result


def test_the_private_step_is_tried_and_advised(leaking):
    formal = [d for d in leaking.defences if d.kind == "formal"]
    without = next(d for d in leaking.defences if d.is_baseline)
    assert [d.name for d in formal] == ["private step, 72 bits"]
    assert formal[0].recall[EXACT] == 0 < 0.3 < without.recall[EXACT]
    advice = leaking.advice[0]
    assert "qbi.Private(model, loss, bits=72)" in advice
    assert "measured" in advice
    point = next(p for p in leaking.budgets if p.bits == 72)
    assert f"{point.read_psnr:.1f} dB" in advice
    assert f"{point.gaussian_psnr:.1f} dB" not in advice


def test_samples_that_mix_are_not_bounded_and_the_advice_says_what_to_change():
    result = audit(tabular(), (TABLE, LABELS), attacks=["qbi"], client=Client(10))
    assert result.status == "leaks"
    assert not any(d.kind == "formal" for d in result.defences)
    assert "qbi.with_group_norm(model)" in result.advice[0]
    kept_apart = package.with_group_norm(tabular())
    again = audit(kept_apart, (TABLE, LABELS), attacks=["qbi"], client=Client(10))
    assert any(d.kind == "formal" for d in again.defences)


def test_the_report_names_what_there_is(leaking):
    """What it offers to be pasted imports and runs; nothing in it names the guards that are gone."""
    page = page_of(leaking)
    for gone in ("LeakGuard", "AmbientGuard", 'policy="budget"', "the guard"):
        assert gone not in page
    pasted = re.findall(r"<pre>(.*?)</pre>", page.split("Code to paste")[1].split("</details>")[0], re.DOTALL)
    assert (
        "private = qbi.Private(model, loss, bits=72)\nfor x, y in private.batches(dataset, batch_size=64):" in pasted[0]
    )
    assert "    private.step(optimiser, x, y)" in pasted[0]
    assert "ClientApp(mods=[leak_guard])" in pasted[1]
    assert 'guarded_by(policy="update")' in pasted[2]
    model = nn.Linear(4, 2)
    names: dict[str, Any] = {
        "model": model,
        "loss": nn.functional.cross_entropy,
        "optimiser": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": (torch.randn(128, 4), torch.arange(128) % 2),
    }
    exec(pasted[0], names)
    assert names["private"].steps == 2
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    for code in pasted[1:]:
        exec(code, {})


def test_the_report_promises_no_picture_quality(leaking):
    """A Gaussian prior bounds nobody who knows more: PSNR is said as measured, and by its name."""
    page = page_of(leaking)
    assert "Gaussian data" in page
    assert "any server can reach" not in page
    assert "most dB" not in page
    assert page.index("b-read") < page.index("b-gaussian")
    # What is said to hold for every server is bits, the guess and ε.
    assert "Bits, the guess and ε hold for every server" in page


def test_an_audit_says_nothing_of_how_samples_were_run(place, qbi_here, tmp_path, monkeypatch):
    """A model without batching rules goes sample by sample; that is the private step's business, not the audit's."""
    monkeypatch.chdir(place)
    handler = logging.StreamHandler(said := io.StringIO())
    logging.getLogger("qbi.private").addHandler(handler)
    try:
        code, _ = qbi_here("audit", "net.py:Branching", "--data", "table.npz", "--attack", "qbi", "--out", tmp_path)
        assert code == 0
        assert "private step" in (tmp_path / "report.html").read_text()
        assert said.getvalue() == ""
        model = namespace()["Branching"]()
        package.Private(model, batch_size=4).step(torch.optim.SGD(model.parameters(), 0.1), TABLE[:4], LABELS[:4])
        assert "one by one" in said.getvalue()  # a user who trains is told
    finally:
        logging.getLogger("qbi.private").removeHandler(handler)


def test_the_report_in_a_browser(place, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next((p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), None)
    if chromium is None:
        pytest.skip("Chromium is not installed")
    from qbi.report.audit import audit_page

    evil = "<script>alert(1)</script>"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 60), nn.ReLU(), nn.Linear(60, 3))
    model.register_module("</script><img src=x onerror=alert(2)>", nn.Identity())
    samples = image_samples(synthetic_photos(120, 16, seed=0))
    result = audit(model, samples, client=Client(10), name=evil)
    shown = result.gallery
    page_text = audit_page(
        result.document(),
        command=f"qbi audit {evil}",
        truth=shown.truth,
        read=shown.read,
        exact=shown.exact,
        seen=shown.seen,
        texts=[[(evil, True)]],
    )
    path = tmp_path / "report.html"
    path.write_text(page_text)
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, width in (("light", 1100), ("dark", 1100), ("light", 390)):
            page = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}).new_page()
            said, asked = [], []
            page.on("console", lambda m, said=said: said.append(m.text))
            page.on("pageerror", lambda e, said=said: said.append(str(e)))
            page.on("dialog", lambda d, said=said: said.append(f"dialog {d.message}"))
            page.on("request", lambda r, asked=asked: asked.append(r.url))
            page.goto(path.as_uri())
            assert page.locator("h1").inner_text() == f"qbi audit of {evil} on {samples.name}"
            assert page.locator("mark").inner_text() == evil
            loaded = page.evaluate("[...document.images].every(i => !i.src || i.naturalWidth > 0)")
            assert loaded
            assert page.locator(".gallery img").count() > 10
            before = page.locator("#chart path").get_attribute("d")
            page.locator("#neurons").focus()
            page.keyboard.press("Home")
            assert page.locator("#neurons-value").inner_text() == "20"
            assert page.locator("#chart path").get_attribute("d") != before
            page.locator("#batch").fill("0")
            assert page.locator("#batch-value").inner_text() == "2"
            page.locator(".zoom").first.click()
            assert page.locator("#large").is_visible()
            page.keyboard.press("Escape")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert said == []
            assert [u for u in asked if not u.startswith(("file:", "data:"))] == []
        browser.close()


def test_a_part_that_fails_is_a_doubt(monkeypatch):
    """A section that is silently missing looks like one that had nothing to say."""

    def fails(*_given):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(assembling, "defended", fails)
    result = audit(tabular(), (TABLE, LABELS), attacks=["qbi"], client=Client(10), batches=1)
    assert any("no such kernel" in doubt for doubt in result.doubts)
