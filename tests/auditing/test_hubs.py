"""`qbi audit hf:NAME` and `timm:NAME` on models saved here; in processes of their own, since what is put on the path stays there."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qbi
from published import missing
from qbi.auditing.loading import load_model

HERE = Path(__file__).parents[1]
QUICK = ["--attack", "passive", "--batches", "1", "--batch-size", "4", "--no-defences", "--no-decode", "--json"]

PREPARED = f"""
import json, sys
sys.path.insert(0, {str(HERE)!r})
import published
published.prepare()
import torch
torch.manual_seed(0)
def command(*arguments):
    sys.argv = ["qbi", *map(str, arguments)]
    from qbi.cli import main
    main()
"""

BERT = """
import transformers
config = transformers.BertConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_labels=3,
    max_position_embeddings=16,
)
transformers.BertForSequenceClassification(config).save_pretrained("bert")
"""

RESNET = """
import timm, pathlib
from safetensors.torch import save_file
model = timm.create_model("test_resnet", num_classes=3)
pathlib.Path("net").mkdir()
save_file(model.state_dict(), "net/model.safetensors")
pathlib.Path("net/config.json").write_text(json.dumps({"architecture": "test_resnet", "num_classes": 3}))
"""


def run(code, tmp_path):
    return subprocess.run(
        [sys.executable, "-c", PREPARED + code], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=250
    )


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.skipif(missing("transformers"), reason="transformers is not installed; `make zoo` fetches it")
def test_a_saved_model_of_transformers_is_audited_with_its_weights(tmp_path):
    draws = np.random.default_rng(0)
    np.savez(tmp_path / "ids.npz", x=draws.integers(1, 64, (20, 8)), y=np.arange(20) % 3)
    check = """
from qbi.auditing.loading import load_model
saved = transformers.BertForSequenceClassification.from_pretrained("bert").state_dict()
assert all(torch.equal(v, saved[n]) for n, v in load_model("hf:./bert", {}).state_dict().items())
"""
    done = run(f"{BERT}{check}\ncommand('audit', 'hf:./bert', '--data', 'ids.npz', *{QUICK})", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"]["status"] == "leaks"
    assert found["accounts"]["bert.embeddings.word_embeddings.weight"] == "leaks"


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.skipif(missing("transformers"), reason="transformers is not installed; `make zoo` fetches it")
def test_pickled_weights_and_classes_from_elsewhere_are_refused(tmp_path):
    pickled = f"""{BERT}
import pathlib
from safetensors.torch import load_file
torch.save(load_file("bert/model.safetensors"), "bert/pytorch_model.bin")
pathlib.Path("bert/model.safetensors").unlink()
command("audit", "hf:./bert")
"""
    done = run(pickled, tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Pickled weights are not opened" in done.stderr
    foreign = """
import pathlib
place = pathlib.Path("bert/config.json")
place.write_text(json.dumps({**json.loads(place.read_text()), "architectures": ["MyOwnModel"]}))
command("audit", "hf:./bert")
"""
    done = run(foreign, tmp_path)
    assert done.returncode == 2
    assert "asks for the class MyOwnModel" in done.stderr


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.skipif(missing("timm"), reason="timm is not installed; `make zoo` fetches it")
def test_a_model_of_timm_by_name_and_from_a_folder(tmp_path):
    code = f"""{RESNET}
from qbi.auditing.loading import load_model
read = load_model("timm:./net", {{}}).state_dict()
assert all(torch.equal(v, read[n]) for n, v in model.state_dict().items())
one, two = (load_model("timm:test_resnet", {{"num_classes": 3}}, seed=s).state_dict() for s in (0, 0))
assert all(torch.equal(one[n], two[n]) for n in one)
command("audit", "timm:./net", "--size", "32", *{QUICK})
"""
    done = run(code, tmp_path)
    assert done.returncode in (0, 3), done.stderr
    found = json.loads(done.stdout)
    assert found["model"]["name"] == "timm:./net"
    assert found["model"]["parameters"] > 0


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.skipif(missing("timm"), reason="timm is not installed; `make zoo` fetches it")
def test_what_timm_cannot_make_is_said_in_a_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    for given, said in {
        '"timm:no_such_net"': "cannot be made",
        '"timm:./empty"': "has no config.json",
        '"timm:test_resnet", "--model-arg", "pretrained=true"': "without a download",
    }.items():
        done = run(f"command('audit', {given})", tmp_path)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr


def test_without_the_packages_one_sentence_says_so(monkeypatch):
    for package, name in {"transformers": "hf:bert", "timm": "timm:resnet18"}.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(qbi.MissingExtra, match=rf"{package} is not installed.*qbi\[models\]"):
            load_model(name, {})
