"""Two audits beside each other: what got worse is said, and decides the exit code."""

import json
from copy import deepcopy

import pytest
import torch
from torch import nn

from qbi.auditing import Client, audit


@pytest.fixture(scope="module")
def audits():
    """Of a wide layer, which a passive server reads, and of a narrow one, which gives it less."""
    x, y = torch.randn(24, 30, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3

    def made(width):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Linear(width, 3))
        return audit(model, (x, y), attacks=["passive"], client=Client(8), batches=1, defences=False).document()

    return {"wide": made(200), "narrow": made(3)}


@pytest.fixture
def compared(audits, tmp_path, qbi_here):
    def run(before, after, *more):
        for name, document in (("before", before), ("after", after)):
            document = audits[document] if isinstance(document, str) else document
            (tmp_path / f"{name}.json").write_text(json.dumps(document))
        return qbi_here("diff", tmp_path / "before.json", tmp_path / "after.json", *more)

    return run


def changed(document, **layer):
    """A copy in which the first layer, and the model with it, has other values."""
    document = deepcopy(document)
    document["outcomes"][0] |= layer
    document["verdict"] |= {k: v for k, v in layer.items() if k in ("status", "share")}
    return document


def test_more_neurons_that_leak_are_worse(audits, compared):
    more, less = audits["wide"]["verdict"]["share"], audits["narrow"]["verdict"]["share"]
    assert more > less + 0.2
    code, said = compared("narrow", "wide", "--json")
    found = json.loads(said)
    assert code == 1
    assert found["change"] in ("worse", "mixed")
    assert found["model"]["before"] == less
    assert found["model"]["after"] == more
    first = next(c for c in found["layers"] if c["layer"] == "0")
    assert first["change"] == "worse"
    assert any(c["what"] == "passive" and c["layer"] == "0" and c["change"] == "worse" for c in found["attacks"])
    # The other way round less is read of the model, but three features are guessed behind the layer: a gain does not make up for that.
    code, said = compared("wide", "narrow")
    assert code == 1
    assert "Worse in part, better in part: a server reads 100.0 %" in " ".join(said.split())


def test_an_audit_and_itself_do_not_differ(compared):
    code, said = compared("wide", "wide")
    assert code == 0
    assert "No change" in said
    assert "settings" not in said


@pytest.mark.parametrize(
    ("before", "after", "code", "change"),
    [
        ({"status": "nothing read", "share": 0.0}, {"status": "leaks", "share": 0.3}, 1, "worse"),
        ({"status": "nothing read", "share": 0.0}, {"status": "leaks", "share": 0.0}, 1, "worse"),
        ({"status": "nothing read", "share": 0.0}, {"status": "not tested", "share": 0.0}, 1, "worse"),
        ({"status": "not tested", "share": 0.0}, {"status": "nothing read", "share": 0.0}, 0, "better"),
        ({"status": "leaks", "share": 0.5}, {"status": "not tested", "share": 0.0}, 3, "unknown"),
        ({"status": "leaks", "share": 0.5}, {"status": "leaks", "share": 0.52}, 1, "worse"),
        ({"status": "leaks", "share": 0.5}, {"status": "nothing read", "share": 0.0}, 0, "better"),
    ],
)
def test_states_and_shares_decide(audits, compared, before, after, code, change):
    base = audits["wide"]
    ended, said = compared(changed(base, **before), changed(base, **after), "--json")
    assert (ended, json.loads(said)["change"]) == (code, change)


def test_a_tolerance_lets_small_changes_pass(audits, compared):
    base = audits["wide"]
    before, after = changed(base, status="leaks", share=0.5), changed(base, status="leaks", share=0.52)
    assert compared(before, after, "--tolerance", 0.05)[0] == 0
    assert compared(before, after, "--tolerance", 0.01)[0] == 1


def test_a_new_layer_that_leaks_is_worse_and_one_that_is_gone_is_not(audits, compared):
    more = deepcopy(audits["wide"])
    more["outcomes"].append(more["outcomes"][0] | {"layer": "new", "status": "leaks", "share": 0.4})
    code, said = compared("wide", more)
    assert code == 1
    assert "worse in new" in " ".join(said.split())
    assert compared(more, "wide")[0] == 0


def test_settings_that_differ_are_named(audits, compared):
    other = deepcopy(audits["wide"])
    other["client"]["batch_size"], other["seed"] = 64, 7
    said = " ".join(compared("wide", other)[1].split())
    assert "client's batch size: 8 → 64" in said
    assert "seed: 0 → 7" in said


BAD = {
    "no JSON": ("{", "not readable as JSON"),
    "another file": ("[1]", "not an audit"),
    "nested": ("[" * 100_000, "not readable as JSON"),
    "another schema": ('{"schema": "qbi-audit/3"}', "run the audit again"),
    "not text": (b"\xff\xfe\x00", "not readable as JSON"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_one_sentence(audits, tmp_path, qbi_here, content, message):
    (tmp_path / "good.json").write_text(json.dumps(audits["wide"]))
    (tmp_path / "bad.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for pair in (("good.json", "bad.json"), ("bad.json", "good.json")):
        code, said = qbi_here("diff", *(tmp_path / name for name in pair))
        assert code == 2
        assert said.count("\n") == 1
        assert message in said
        assert "bad.json" in said


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("outcomes"),
        lambda d: d["verdict"].update(share=float("nan")),
        lambda d: d["verdict"].update(share="all"),
        lambda d: d["outcomes"][0].update(status="fine"),
        lambda d: d["attacks"].insert(0, 3),
        lambda d: d["attacks"][0].update(recovered_from_gradients={"mse<1e-10": 1}),
        lambda d: d.update(sentences={}),
        lambda d: d["side_information"].append({"what": "labels"}),
    ],
)
def test_a_damaged_report_is_one_sentence(audits, compared, damage):
    document = deepcopy(audits["wide"])
    damage(document)
    code, said = compared("wide", document)
    assert code == 2
    assert "missing or damaged; run the audit again" in said


def test_other_measures_and_missing_files_are_refused(audits, compared, qbi_here, tmp_path):
    other = deepcopy(audits["wide"])
    other["verdict"]["threshold"] = "mse<1e-10"
    assert "--fail-at" in compared("wide", other)[1]
    other = deepcopy(audits["wide"])
    other["data"]["kind"] = "text"
    assert "same data" in compared("wide", other)[1]
    code, said = qbi_here("diff", tmp_path / "a.json", tmp_path / "b.json")
    assert (code, "no such file" in said) == (2, True)
    assert compared("wide", "wide", "--tolerance", "nan")[0] == 2
