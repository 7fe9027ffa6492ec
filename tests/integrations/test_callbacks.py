"""Audits before training: in transformers' own Trainer and in Lightning's where they are there, and in a stand-in for Lightning."""

import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import qbi
from published import missing
from qbi.integrations.callbacks import lightning_audit, trainer_audit
from qbi.integrations.judging import AuditFailed

HERE = Path(__file__).parents[1]

TRAINER = """
import sys
sys.path.insert(0, {here!r})
import published
published.prepare()
import torch, transformers
from qbi.integrations.callbacks import trainer_audit
from qbi.integrations.judging import AuditFailed

torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_labels=3,
    max_position_embeddings=16, attn_implementation="eager",
)
data = [{{"input_ids": torch.randint(1, 64, (8,)), "labels": i % 3}} for i in range(40)]

def trained(*callbacks):
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    before = model.classifier.weight.detach().clone()
    arguments = transformers.TrainingArguments(
        {out!r}, max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))
    try:
        trainer.train()
    except AuditFailed as problem:
        assert torch.equal(before, model.classifier.weight), "training had begun"
        return str(problem), before
    return "", model.classifier.weight.detach()

kept = []
quick = dict(attacks=["passive"], batches=1, defences=False)
said, after = trained(trainer_audit(done=kept.append, **quick))
assert not said and kept[0].status == "leaks" and kept[0].client.batch_size == 4, kept
assert torch.equal(after, trained()[1]), "the audit changed the training"
said, _ = trained(trainer_audit(fail_above=0.1, **quick))
assert "may be" in said, said
print("done")
"""

FITTING = """
import sys
sys.path.insert(0, {here!r})
import torch, lightning
from torch import nn
from qbi.integrations.callbacks import lightning_audit
from qbi.integrations.judging import AuditFailed

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3))
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fitted(*callbacks):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 12), torch.arange(40) % 3)
    net = Net()
    before = net.net[0].weight.detach().clone()
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=list(callbacks),
    )
    try:
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    except AuditFailed as problem:
        assert torch.equal(before, net.net[0].weight), "training had begun"
        return str(problem), before
    return "", net.net[0].weight.detach()

kept = []
quick = dict(attacks=["passive"], batches=1, defences=False)
said, after = fitted(lightning_audit(done=kept.append, **quick))
assert not said and kept[0].recall == 1, kept
assert torch.equal(after, fitted()[1]), "the audit changed the training"
assert "may be" in fitted(lightning_audit(fail_above=0.1, **quick))[0]
print("done")
"""


def run(script, tmp_path):
    """In a process of its own, since what is put on the path stays there."""
    code = script.format(here=str(HERE), out=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.skipif(missing("transformers"), reason="transformers is not installed; `make zoo` fetches it")
def test_the_trainer_of_transformers_audits_first_and_trains_as_before(tmp_path):
    run(TRAINER, tmp_path)


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightnings_trainer_audits_first_and_trains_as_before(tmp_path):
    run(FITTING, tmp_path)


QUICK = {"attacks": ["passive"], "batches": 1, "defences": False}


@pytest.fixture
def lightning(monkeypatch):
    """A stand-in: the base class, and a trainer with what the callback asks for."""
    package, inner = types.ModuleType("lightning"), types.ModuleType("lightning.pytorch")
    vars(inner)["Callback"] = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", inner)

    def start(callback, data, rank=0, size=4):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3))
        loader = data if not isinstance(data, TensorDataset) else DataLoader(data, batch_size=size, shuffle=True)
        callback.on_train_start(types.SimpleNamespace(is_global_zero=rank == 0, train_dataloader=loader), net)

    return start


def table():
    draws = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(40, 12, generator=draws), torch.arange(40) % 3)


def test_a_callback_keeps_the_result_fails_above_a_share_and_leaves_the_random_state(lightning):
    kept = []
    torch.manual_seed(0)
    nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3))
    expected = torch.get_rng_state()
    lightning(lightning_audit(done=kept.append, **QUICK), table())
    assert torch.equal(torch.get_rng_state(), expected)
    assert kept[0].recall == 1
    assert kept[0].client.batch_size == 4
    lightning(lightning_audit(fail_above=1, **QUICK), table())
    with pytest.raises(AuditFailed, match=r"100\.0 % is read, and at most 10\.0 % may be"):
        lightning(lightning_audit(fail_above=0.1, **QUICK), table())
    with pytest.raises(qbi.BadValue, match="3 is no share"):
        lightning_audit(fail_above=3)


def test_one_process_of_many_audits(lightning):
    lightning(lightning_audit(fail_above=0, **QUICK), table(), rank=1)


def test_data_that_would_be_used_up_are_refused(lightning):
    class Stream(IterableDataset):
        def __iter__(self):
            raise AssertionError("used up")

    with pytest.raises(qbi.DataError, match="without being used up"):
        lightning(lightning_audit(**QUICK), DataLoader(Stream(), batch_size=4))


def test_without_the_packages_one_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(qbi.MissingExtra, match=r"qbi\[models\]"):
        trainer_audit()
    with pytest.raises(qbi.MissingExtra, match=r"qbi\[lightning\]"):
        lightning_audit()
