"""BERT and GPT-2 as they were published: their sizes, what sees what, and adapters that change nothing at first."""

import pytest
import torch

from qbi.lab.measurements.text import TextTask, settings
from qbi.lab.sentences import build
from qbi.lab.text_models import Bert, Gpt2


@pytest.mark.parametrize(
    ("kind", "vocabulary", "published"), [(Bert, 30_522, 109_483_778), (Gpt2, 50_257, 124_439_808)]
)
def test_twelve_layers_have_the_published_number_of_parameters(kind, vocabulary, published):
    """BERT-base with a pooler and two classes, and GPT-2 small, whose head is its table."""
    with torch.device("meta"):
        model = kind(vocabulary, 768, 12)
    assert sum(p.numel() for p in model.parameters()) == published


def test_a_decoder_looks_back_and_an_encoder_both_ways():
    ids = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % 50
    decoder, encoder = (build(kind, 128, 1, vocabulary=50).model for kind in ("GPT-2", "BERT"))
    assert torch.allclose(decoder(ids)[:, :-1], decoder(changed)[:, :-1], atol=1e-6)
    assert not torch.allclose(encoder(ids), encoder(changed), atol=1e-6)


@pytest.mark.parametrize("kind", ["BERT", "GPT-2"])
def test_adapters_change_nothing_at_first_and_are_all_that_is_trained(kind):
    ids = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))
    plain, adapted = (build(kind, 128, 2, vocabulary=50, rank=rank).model for rank in (0, 4))
    adapted_weights = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert adapted_weights
    assert all("lora" in name for name in adapted_weights)
    assert torch.allclose(plain(ids), adapted(ids), atol=1e-6)


def test_entries_of_the_measurement_have_names_of_their_own():
    names = [task.key for task in settings()]
    assert len(set(names)) == len(names)
    assert TextTask("BERT", "1,024 wide, as initialised", 32, batch=2).key == "BERT-1-024-wide-as-initialised-32-2"
