"""Sentences in an audit: the record, the verdict, the document and the page."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from test_reading import VOCABULARY, batch, foretold, masked, shortened, small

from qbi.auditing import Client, audit
from qbi.records import TextData
from qbi.report.audit import audit_page

ROOT = Path(__file__).parents[2]


def texts(count=40):
    words = ("[PAD]", *(f"word{i}" for i in range(1, VOCABULARY)))
    return TextData("texts", batch(count), torch.arange(count) % 2, ("a", "b"), words)


def look(model, **more):
    return audit(model, texts(), client=Client(4), attacks=["passive"], batches=1, defences=False, **more)


@pytest.fixture(scope="module")
def audited():
    return look(small(False))


def test_an_audit_reads_sentences_and_says_so(audited):
    result, found = audited, audited.sentences
    assert found.decided
    assert found.exact == 1
    assert found.rouge_1 == found.rouge_2 == 1
    assert found.guessed < 0.3
    assert "can recover 100 % of the sequences exactly" in result.verdict
    assert result.status == "leaks"
    document = result.document()
    jsonschema.validate(document, json.loads((ROOT / "docs/report.schema.json").read_text()))
    page = audit_page(document, command="qbi audit", texts=found.marked)
    assert "Sentences from gradients" in page
    assert page.count("<mark>word") == sum(right for row in found.marked for _, right in row) > 20
    assert "<mark>word" not in audit_page(document, command="qbi audit")


def test_what_is_not_decided_is_said_and_counts_for_nothing():
    result = look(small(False, dropout=0.3))
    assert not result.sentences.decided
    assert "dropped at random" in result.sentences.reason
    assert "sentences" not in result.verdict
    assert "Not decided, which is not safe" in audit_page(result.document(), command="qbi audit")


def test_numbers_have_no_sentences():
    model = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.ReLU(), torch.nn.Linear(20, 2))
    data = torch.randn(40, 6), torch.arange(40) % 2
    assert audit(model, data, client=Client(4), attacks=["passive"], batches=1, defences=False).sentences is None


def test_says_more_needs_more_than_a_guess(audited):
    found = audited.sentences
    assert found.says_more
    assert not replace(found, guessed=1.0).says_more
    assert not replace(found, proven=0).says_more


def lengths(count=40):
    return shortened(batch(count), 3)


def test_a_mask_of_lengths_is_no_hindrance():
    ids = lengths()
    data = (*masked(ids), torch.arange(len(ids)) % 2)
    found = audit(small(False), data, client=Client(4), attacks=["passive"], batches=1, defences=False).sentences
    assert found.decided
    assert found.exact == 1
    assert all(len(row) <= 8 for row in found.marked)
    assert sum(map(len, found.marked)) < 4 * 8


def test_a_mask_that_hides_several_tokens_is_not_guessed():
    ids = lengths()
    hidden = masked(ids)[1]
    hidden[:, 1] = torch.arange(len(ids)) % 2
    data = (ids, hidden, torch.arange(len(ids)) % 2)
    found = audit(small(False), data, client=Client(4), attacks=["passive"], batches=1, defences=False).sentences
    assert not found.decided
    assert "would have to guess it" in found.reason


def test_the_last_token_of_a_text_that_is_foretold_is_not_asked_for():
    ids = batch(40)
    how = {"loss": foretold, "client": Client(4)}
    found = audit(small(True), (ids, ids), **how, attacks=["passive"], batches=1, defences=False).sentences
    assert found.decided
    assert found.exact == 1
