"""An audit as a dictionary, as a table, as a section of a model card."""

import sys

import pytest
import torch
from torch import nn

import qbi
from qbi.report.formats import FORMATS, Written
from qbi.report.model_card import to_model_card


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3))
    data = torch.randn(40, 12), torch.arange(40) % 3
    return qbi.audit(
        model, data, client=qbi.Client(4), batches=1, name="net | @all <b>\n# x", attacks=["passive", "cascade"]
    )


def test_a_dictionary_is_the_document(result):
    assert result.to_dict() == result.document()


def test_a_table_has_the_attacks_with_their_shares(result):
    pytest.importorskip("pandas")
    table = result.to_dataframe()
    assert len(table) >= len(result.attacks) > 0
    assert list(table["attack"])[: len(result.attacks)] == [a.attack for a in result.attacks]
    assert table["share"].max() == pytest.approx(result.share)
    assert set(table["layer"]) == {o.layer for o in result.outcomes}
    assert float(table["exact"].max()) == pytest.approx(result.attacks[0].recovered[qbi.EXACT].mean)


def test_without_pandas_one_sentence_says_so(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(qbi.MissingExtra, match=r"pandas is not installed.*qbi\[frames\]"):
        result.to_dataframe()


def test_a_model_card_says_what_was_read_and_takes_nothing_as_markup(result):
    card = FORMATS["model-card"].write(Written(result.document()))
    assert card == to_model_card(result.document())
    assert "| passive | 0 | as it is | 100.0 % |" in card
    assert "qbi.Private(model, loss, bits=72)" in card
    assert "Only 1 batch was tried" in card
    assert "net \\| &#64;all &lt;b&gt; \\# x" in card
    assert "@all" not in card
    assert "\n# x" not in card


def test_a_model_card_names_what_was_not_tested():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(12))

        def forward(self, x):
            return (x * self.scale.exp()).view(-1, 3, 4).sum(2)

    found = qbi.audit(Scaled(), (torch.randn(20, 12), torch.arange(20) % 3), client=qbi.Client(4), batches=1)
    card = to_model_card(found.document())
    assert "### Not tested" in card
    assert "scale" in card
    assert "| server |" not in card


@pytest.mark.long
def test_the_command_writes_it(qbi_here, tmp_path):
    small = ("--size", 8, "--neurons", 20, "--batch-size", 4, "--batches", 1, "--no-defences", "--no-decode")
    code, _ = qbi_here("audit", *small, "--format", "model-card", "--out", tmp_path)
    assert code == 0
    assert (tmp_path / "model-card.md").read_text().startswith("## Privacy of updates")
