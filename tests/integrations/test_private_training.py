"""Private steps inside transformers' own Trainer and Lightning's: the same steps as by hand, and nothing else is saved or logged."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

import qbi
from published import missing
from qbi.integrations.private_batches import Collated, DrawnBatches
from qbi.integrations.private_lightning import private_lightning
from qbi.integrations.private_trainer import private_trainer

HERE = Path(__file__).parents[1]

TRANSFORMERS = """
import json, math, sys, warnings
from pathlib import Path
sys.path.insert(0, {here!r})
import published
published.prepare()
import torch, transformers
from safetensors.torch import load_file
import qbi
from qbi.integrations.private_trainer import private_trainer

out = Path({out!r})

def bert(**more):
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_labels=3,
        max_position_embeddings=16, attn_implementation="eager", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **more))

torch.manual_seed(1)
data = [{{"input_ids": torch.randint(1, 64, (8,)).tolist(), "labels": i % 3}} for i in range(6)]

def arguments(**more):
    given = dict(num_train_epochs=2, per_device_train_batch_size=6, use_cpu=True, report_to=[], save_strategy="epoch", disable_tqdm=True,
                 logging_steps=1)
    return transformers.TrainingArguments(str(out), **(given | more))

def optimisers(model):
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0)
"""

SAME = (
    TRANSFORMERS
    + """
# One batch is the whole data set, so that the order of drawing changes no sum but by rounding.
reports = []
model = bert()
trainer = private_trainer(model, arguments(), train_dataset=data, optimizers=optimisers(model), bits=72, seen=reports.append,
                          ledger=str(out / "own.ledger"))
trainer.private._repeat(5)
done = trainer.train()

other = bert().train()
private = qbi.Private(other, lambda output, y: output.loss, bits=72)
private._repeat(5)
adam, _ = optimisers(other)
inputs = {{"input_ids": torch.tensor([d["input_ids"] for d in data]), "labels": torch.tensor([d["labels"] for d in data])}}
for x, y in private.batches((inputs, inputs["labels"]), batch_size=6, epochs=2):
    private.step(adam, x, y)
mine, theirs, begun = trainer.private.state_dict(), private.state_dict(), bert().state_dict()
assert mine.keys() == theirs.keys()
for name in mine:
    assert torch.allclose(mine[name], theirs[name], atol=1e-5), name
assert any((mine[n] - begun[n]).abs().max() > 0.005 for n in mine), "nothing was trained"
assert trainer.private.steps == 2 and trainer.private.account.participations == 2 and len(reports) == 2
assert round(sum(e.bits for e in qbi.Ledger(str(out / "own.ledger")).entries())) == 144

# What is saved is what may leave; no loss is logged, stored or returned.
trainer.save_model(str(out / "final"))
for folder in (out / "final", out / "checkpoint-2"):
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == mine.keys() and all(torch.equal(saved[n], mine[n]) for n in saved), folder
text = (out / "checkpoint-2/trainer_state.json").read_text()
assert '"learning_rate"' in text and '"loss"' not in text and "grad_norm" not in text, text
assert trainer.state.total_flos == 0
assert math.isnan(done.training_loss) and "train_loss" not in done.metrics
assert not any(k in entry for entry in trainer.state.log_history for k in ("loss", "train_loss", "grad_norm"))
print("done")
"""
)

MORE = (
    TRANSFORMERS
    + """
# Weights that are tied stay tied, and come back from what was saved.
torch.manual_seed(0)
gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=8, n_layer=1, n_head=2))
texts = [{{"input_ids": [i % 40, (i + 1) % 40, 3, 4], "labels": [i % 40, (i + 1) % 40, 3, 4]}} for i in range(5)]
trainer = private_trainer(gpt, arguments(per_device_train_batch_size=2, save_strategy="no"), train_dataset=texts, bits=72, sampling="poisson")
trainer.train()
assert trainer.private.steps == 6
trainer.save_model(str(out / "gpt"))
again = transformers.GPT2LMHeadModel.from_pretrained(out / "gpt")
assert torch.equal(again.lm_head.weight, again.transformer.wte.weight)
for name, value in trainer.private.state_dict().items():
    assert torch.equal(again.state_dict()[name], value), name

# An audit first, on the data as they are drawn from.
from qbi.integrations.callbacks import trainer_audit
audits = []
audit_first = trainer_audit(done=audits.append, attacks=["passive"], batches=1, defences=False)
few = [{{"input_ids": torch.randint(1, 64, (8,)).tolist(), "labels": i % 3}} for i in range(40)]
small = arguments(max_steps=1, per_device_train_batch_size=4, save_strategy="no")
private_trainer(bert(), small, train_dataset=few, callbacks=[audit_first], bits=72).train()
assert audits[0].status == "leaks" and audits[0].client.batch_size == 4

# A budget that is spent ends training.
def refusal(make, what):
    try:
        made = make()
        made.train()
    except qbi.QbiError as problem:
        assert what in str(problem), (what, str(problem))
    else:
        raise AssertionError(what)

refusal(lambda: private_trainer(bert(), arguments(num_train_epochs=3), train_dataset=data, bits=72, total=150), "150")

# What cannot be honoured is refused.
for more, what in (
    (dict(gradient_accumulation_steps=2), "accumulated"), (dict(bf16=True), "mixed precision"),
    (dict(torch_compile=True), "torch_compile"), (dict(gradient_checkpointing=True), "gradient_checkpointing"),
    (dict(label_smoothing_factor=0.1), "label smoothing"), (dict(eval_strategy="epoch"), "evaluation during training"),
    (dict(dataloader_drop_last=True), "drawn by private.batches"), (dict(include_num_input_tokens_seen="all"), "how long samples are"),
    (dict(train_sampling_strategy="group_by_length"), "drawn by private.batches"),
    (dict(auto_find_batch_size=True), "auto_find_batch_size"), (dict(neftune_noise_alpha=5.0), "NEFTune"),
    (dict(load_best_model_at_end=True, eval_strategy="epoch"), "evaluation during training"),
):
    refusal(lambda: private_trainer(bert(), arguments(**more), train_dataset=data, bits=72), what)

class Own(transformers.Trainer):
    def compute_loss(self, model, inputs, **more):
        return model(**inputs).loss

model = bert()
warm, scheduler = optimisers(model)
model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([0])).loss.backward()
warm.step()
for make, what in (
    (lambda: private_trainer(bert(), arguments(), train_dataset=data, bits=72, base=Own), "Own.compute_loss"),
    (lambda: private_trainer(bert(), arguments(), train_dataset=data, bits=72, base=dict), "no subclass"),
    (lambda: private_trainer(bert(), arguments(), bits=72), "train_dataset"),
    (lambda: private_trainer(model, arguments(), train_dataset=data, bits=72, optimizers=(warm, scheduler)), "holds a state"),
    (lambda: private_trainer(bert(), arguments(), train_dataset=[{{"input_ids": [1, 2]}}] * 6, bits=72), "no labels"),
    (lambda: private_trainer(bert(), arguments(), train_dataset=[*data[:5], {{"input_ids": [1], "labels": 0}}], bits=72), "max_length"),
):
    refusal(make, what)

class Resumed:
    def __init__(self):
        self.trainer = private_trainer(bert(), arguments(), train_dataset=data, bits=72)
    def train(self):
        self.trainer.train(resume_from_checkpoint=True)

refusal(Resumed, "ledger count on")
print("done")
"""
)

LIGHTNING = """
import sys, warnings
from pathlib import Path
import torch, lightning
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import qbi
from qbi.integrations.private_lightning import private_lightning

out = Path({out!r})

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, number):
        raise AssertionError("not this one")
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

torch.manual_seed(1)
data = torch.randn(10, 12), torch.arange(10) % 3

def trainer(**more):
    given = dict(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=str(out))
    return lightning.Trainer(**(given | more))

reports = []
fitting = private_lightning(Net(), data, batch_size=10, bits=72, seen=reports.append, ledger=str(out / "own.ledger"))
begin = fitting.configure_optimizers
def repeated():
    made = begin()
    fitting.private._repeat(5)
    return made
fitting.configure_optimizers = repeated
fitted = trainer()
fitted.fit(fitting)

other = Net().train()
private = qbi.Private(other, F.cross_entropy, bits=72)
private._repeat(5)
adam = other.configure_optimizers()
for x, y in private.batches(data, batch_size=10, epochs=2):
    private.step(adam, x, y)
mine, theirs, begun = fitting.private.state_dict(), private.state_dict(), Net().state_dict()
for name in theirs:
    assert torch.allclose(mine[name], theirs[name], atol=1e-5), name
    assert (mine[name] - begun[name]).abs().max() > 0.005, "nothing was trained"
assert fitted.global_step == fitting.private.steps == len(reports) == 2
assert fitting.private.account.participations == 2

# Checkpoints hold what may leave, under the model's own names; no number of the data is logged.
for path in [*out.rglob("*.ckpt")]:
    kept = torch.load(path, weights_only=False)
    assert kept["state_dict"].keys() == mine.keys() and all(torch.equal(kept["state_dict"][n], mine[n]) for n in mine)
    Net.load_from_checkpoint(path, weights_only=False)
assert path and not fitted.callback_metrics and not fitted.logged_metrics

steps = trainer(max_epochs=9, max_steps=3, enable_checkpointing=False)
fitting = private_lightning(Net().net, data, batch_size=4, bits=72, optimiser=lambda w: torch.optim.SGD(w, lr=0.1), sampling="poisson")
steps.fit(fitting)
assert fitting.private.steps == steps.global_step == 3

from qbi.integrations.callbacks import lightning_audit
audits = []
audit_first = lightning_audit(done=audits.append, attacks=["passive"], batches=1, defences=False)
many = torch.randn(40, 12), torch.arange(40) % 3
once = trainer(max_steps=1, enable_checkpointing=False, callbacks=[audit_first])
once.fit(private_lightning(Net(), many, batch_size=4, bits=72))
assert audits[0].status == "leaks" and audits[0].client.batch_size == 4

class Scheduled(Net):
    def configure_optimizers(self):
        adam = super().configure_optimizers()
        return [adam], [torch.optim.lr_scheduler.StepLR(adam, 1)]

def refusal(what, *, net=None, fit=None, total=None, **more):
    made = private_lightning(net or Net(), data, batch_size=4, bits=72, total=total)
    try:
        trainer(enable_checkpointing=False, **more).fit(made, **(fit or {{}}))
    except Exception as problem:
        assert what in str(problem), (what, problem)
    else:
        raise AssertionError(what)

refusal("float32 only", precision="bf16-mixed")
refusal("gradient accumulation is not supported", accumulate_grad_batches=2)
refusal("gradient clipping is not supported", gradient_clip_val=1.0)
refusal("without a loader", fit=dict(train_dataloaders=DataLoader(TensorDataset(*data), batch_size=4)))
refusal("is not resumed", fit=dict(ckpt_path=str(path), weights_only=False))
refusal("without schedulers", net=Scheduled())
refusal("150", total=150, max_epochs=3)
try:
    private_lightning(Net(), data, batch_size=4).private
except qbi.QbiError as problem:
    assert "has not begun" in str(problem)
try:
    private_lightning(Net().net, data, batch_size=4)
except qbi.QbiError as problem:
    assert "optimiser=" in str(problem)
print("done")
"""


def run(script, tmp_path):
    """In a process of its own, since what is put on the path stays there."""
    code = script.format(here=str(HERE), out=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.skipif(missing("transformers"), reason="transformers is not installed; `make zoo` fetches it")
@pytest.mark.parametrize("script", [SAME, MORE], ids=["the same steps", "tied weights, budgets, refusals"])
def test_steps_inside_the_trainer_of_transformers_are_private(tmp_path, script):
    run(script, tmp_path)


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_steps_inside_lightnings_trainer_are_private(tmp_path):
    run(LIGHTNING, tmp_path)


def test_a_loader_draws_a_pass_each_time_and_counts_it():
    model = torch.nn.Linear(4, 2)
    private = qbi.Private(model, bits=72)
    data = torch.randn(10, 4), torch.arange(10) % 2
    loader = DrawnBatches(lambda: private, data, 4)
    assert len(loader) == 3
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        assert sum(len(private.step(optimiser, x, y) and y) for x, y in loader) == 10
    assert private.account.participations == 2
    assert private.steps == 6


def test_samples_are_collated_alone_and_have_one_shape():
    seen = []

    def collate(samples):
        seen.append(len(samples))
        return {"x": torch.tensor([samples[0]])}

    data = Collated([[1, 2], [3, 4], [5]], collate)
    assert torch.equal(data[1]["x"], torch.tensor([3, 4]))
    with pytest.raises(qbi.BadValue, match=r"\(2,\) and \(1,\)"):
        data[2]
    assert seen == [1, 1]
    with pytest.raises(qbi.BadValue, match="more of a sample than tensors"):
        Collated([1], lambda samples: {"x": "text"})[0]


def test_data_without_a_length_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            raise AssertionError("used up")

    with pytest.raises(qbi.BadValue, match="Stream has no length"):
        DrawnBatches(lambda: None, Stream(), 4)  # type: ignore[arg-type, return-value]


def test_without_the_packages_one_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(qbi.MissingExtra, match=r"qbi\[models\]"):
        private_trainer(torch.nn.Linear(2, 2), None)
    with pytest.raises(qbi.MissingExtra, match=r"qbi\[lightning\]"):
        private_lightning(torch.nn.Linear(2, 2), (), batch_size=2)
