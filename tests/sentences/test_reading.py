"""Sentences out of real gradients of small transformers, and what must read nothing."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qbi.errors import CannotRead
from qbi.federation import client_step
from qbi.sentences import read_sentences, score
from qbi.sentences.above_noise import tokens_of_tables
from qbi.sentences.span import ROUNDING

VOCABULARY, LENGTH, WIDTH = 300, 8, 128


class Small(nn.Module):
    """Embeddings with places, attention layers, and a head on the first position, or on all where tokens are foretold."""

    def __init__(self, *, causal, width=WIDTH, dropout=0.0, layers=3, pooled=False):
        super().__init__()
        self.causal, self.pooled = causal, pooled
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        layer = nn.ModuleList
        self.queries, self.keys, self.values, self.out, self.up, self.down = (
            layer(nn.Linear(a * width, b * width) for _ in range(layers))
            for a, b in ((1, 1), (1, 1), (1, 1), (1, 1), (1, 2), (2, 1))
        )
        self.norms = layer(nn.LayerNorm(width) for _ in range(2 * layers))
        self.head = nn.Linear(width, VOCABULARY if causal else 2)

    def forward(self, ids, mask=None):
        seen = None if mask is None else mask[:, None, None].bool()
        if self.causal:
            before = torch.ones(2 * ids.shape[1:], dtype=torch.bool).tril()
            seen = before if seen is None else before & seen
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(self.norm(x))
        for i in range(len(self.queries)):
            q, k, v = (m[i](x).unflatten(-1, (4, -1)).transpose(1, 2) for m in (self.queries, self.keys, self.values))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
            x = self.norms[2 * i](x + self.out[i](mixed))
            x = self.norms[2 * i + 1](x + self.down[i](F.gelu(self.up[i](x))))
        if self.pooled:
            weights = torch.ones_like(x[:, :, :1]) if mask is None else mask[:, :, None]
            return self.head((x * weights).sum(1) / weights.sum(1))
        return self.head(x) if self.causal else self.head(x[:, 0])


PADDING = 0


def foretold(outputs, ids):
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PADDING)


def batch(size, seed=0):
    return torch.randint(1, VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(seed))


def shortened(ids, seed=0):
    lengths = torch.randint(3, LENGTH + 1, (len(ids), 1), generator=torch.Generator().manual_seed(seed))
    return ids.masked_fill(torch.arange(LENGTH) >= lengths, PADDING)


def masked(ids):
    return ids, (ids != PADDING).long()


def without_padding(rows):
    return [[token for token in row if token != PADDING] for row in rows]


def sent(model, ids, feed=lambda ids: (ids,)):
    torch.manual_seed(0)
    if model.causal:
        return client_step(model, feed(ids), ids, loss=foretold).gradients
    return client_step(model, feed(ids), torch.arange(len(ids)) % 2).gradients


def small(causal, **changes):
    torch.manual_seed(1)
    return Small(causal=causal, **changes)


def read(model, gradients, size, **more):
    return read_sentences(model, gradients, vocabulary=VOCABULARY, length=LENGTH, batch_size=size, **more)


@pytest.mark.parametrize("size", [1, 4, 8])
def test_an_encoder_gives_its_batch_away(size):
    model, ids = small(False), batch(size)
    found = read(model, sent(model, ids), size)
    assert not found.causal
    assert score(found.sequences, ids.tolist()).exact == 1
    assert set(found.tokens) == set(ids.flatten().tolist())


@pytest.mark.parametrize("size", [1, 4])
def test_an_encoder_whose_head_sees_the_mean_gives_its_batch_away(size):
    """Then every position of every layer gets something back, and all of them are tested together."""
    model, ids = small(False, pooled=True), batch(size)
    found = read(model, sent(model, ids), size)
    assert score(found.sequences, ids.tolist()).exact == 1
    assert all(found.proven)


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("kind", ["encoder", "encoder by its mean", "decoder"])
def test_sequences_of_different_lengths_are_read_under_a_mask(kind, size):
    model = small(kind == "decoder", pooled=kind == "encoder by its mean")
    ids = shortened(batch(size), size)
    assert (ids == PADDING).any()
    found = read(model, sent(model, ids, masked), size, feed=masked, padding=PADDING)
    truth = without_padding(ids.tolist())
    seen = [row[:-1] for row in truth] if model.causal else truth
    assert score(without_padding(found.sequences), seen).exact == 1
    assert sum(found.proven) == size
    other = [row[: len(seen[0])] for row in without_padding(shortened(batch(size, 9), 9).tolist())]
    assert score(without_padding(found.sequences), other).exact == 0


def test_a_mask_that_the_server_does_not_count_on_reads_less():
    """Without the token that is hidden, whole sequences are looked for, and those that ended are not among them."""
    model, ids = small(False), shortened(batch(4), 4)
    found = read(model, sent(model, ids, masked), 4, feed=masked)
    assert score(without_padding(found.sequences), without_padding(ids.tolist())).exact < 1


def test_sequences_that_share_their_tokens_are_told_apart():
    """The same words at the same places in several samples, and one sample twice."""
    model, ids = small(False), batch(6)
    ids[1, :5] = ids[0, :5]
    ids[2, 6:] = ids[0, 6:]
    ids[5] = ids[4]
    found = read(model, sent(model, ids), 6)
    assert {tuple(row) for row in ids.tolist()} == set(found.sequences[: sum(found.proven)])


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_decoder_gives_all_but_the_last_token_away(size):
    """The last one is a target only: no layer sees it."""
    model, ids = small(True), batch(size)
    found = read(model, sent(model, ids), size)
    assert found.causal
    assert score(found.sequences, ids[:, :-1].tolist()).exact == 1
    assert all(found.proven)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_read_is_this_batch_and_no_other(causal):
    model, ids, other = small(causal), batch(4), batch(4, seed=9)
    found = read(model, sent(model, other), 4)
    assert score(found.sequences, other[:, : LENGTH - causal].tolist()).exact == 1
    assert score(found.sequences, ids[:, : LENGTH - causal].tolist()).exact == 0


def test_shuffled_gradients_read_nothing():
    """Entries in another order, and rows of noise of the same size: nothing lies in their span, or they span everything."""
    model, ids = small(False), batch(4)
    draws = torch.Generator().manual_seed(3)
    mixed = {n: g.flatten()[torch.randperm(g.numel(), generator=draws)].view_as(g) for n, g in sent(model, ids).items()}
    with pytest.raises(CannotRead, match="spans all"):
        read(model, mixed, 4)
    turned = {n: g.roll(1, -1) if g.dim() == 2 else g for n, g in sent(model, ids).items()}
    assert read(model, turned, 4).sequences == ()


def test_the_model_of_another_round_reads_nothing():
    ids = batch(4)
    torch.manual_seed(7)
    assert read(Small(causal=False), sent(small(False), ids), 4).tokens == ()


def test_more_tokens_than_dimensions_are_not_decided():
    model = small(False, width=32)
    with pytest.raises(CannotRead, match="nothing can be told"):
        read(model, sent(model, batch(8)), 8)


def test_dropout_before_the_layer_is_said():
    model = small(False, dropout=0.2)
    with pytest.raises(CannotRead, match="dropped at random"):
        read(model, sent(model, batch(4)), 4)


def test_rounding_to_half_the_digits_needs_to_be_known():
    """In bfloat16 the rank is decided by that rounding; the same call that takes it for float32 spans everything."""
    model, ids = small(True), batch(2)
    coarse = {n: g.bfloat16().float() for n, g in sent(model, ids).items()}
    with pytest.raises(CannotRead, match="spans all"):
        read(model, coarse, 2)
    assert set(read(model, coarse, 2, rounding=2.0**-9).tokens) >= set(ids[:, :-1].flatten().tolist())


def noisy(gradients, share, seed=0):
    """Each gradient with noise of so much of its own size."""
    draws = torch.Generator().manual_seed(seed)
    return {
        n: g + share * g.square().mean().sqrt() * torch.randn(g.shape, generator=draws) for n, g in gradients.items()
    }


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("share", [None, 1e-4, 1e-3])
def test_an_encoder_is_read_in_half_precision_and_through_weak_noise(share, frozen):
    """No single token can be tested any more; whole sequences can, whether the table says which tokens there are or not."""
    model, ids, other = small(False), batch(4), batch(4, seed=9)
    model.words.requires_grad_(not frozen)
    gradients = sent(model, ids)
    coarse = {n: g.bfloat16().float() for n, g in gradients.items()} if share is None else noisy(gradients, share)
    found = read(model, coarse, 4, rounding=2.0**-9 if share is None else ROUNDING)
    assert score(found.sequences, ids.tolist()).exact == 1
    assert all(found.proven)
    assert score(found.sequences, other.tolist()).exact == 0


def test_a_sequence_that_passes_with_another_word_too_is_not_proven():
    """Words that are nearly the same, and noise that hides what is left of the difference."""
    draws = torch.Generator().manual_seed(0)
    wrong = proven = 0
    for seed in range(3):
        model, ids = small(False), 2 * (batch(4, seed=seed) // 2)
        with torch.no_grad():
            table = model.words.weight
            table[1::2] = table[::2] + 0.03 * torch.randn(table[::2].shape, generator=draws)
        model.words.requires_grad_(False)
        try:
            found = read(model, noisy(sent(model, ids), 1e-2, seed), 4)
        except CannotRead:
            continue
        truth = {tuple(row) for row in ids.tolist()}
        proven += sum(found.proven)
        wrong += sum(row not in truth for row, sure in zip(found.sequences, found.proven, strict=True) if sure)
    assert wrong <= proven / 4


def test_strong_noise_and_noise_alone_are_not_decided():
    model, ids = small(False), batch(4)
    gradients = sent(model, ids)
    only = {n: noise - gradients[n] for n, noise in noisy(gradients, 1.0).items()}
    for given in (noisy(gradients, 1.0), only):
        with pytest.raises(CannotRead):
            read(model, given, 4)


def test_the_table_says_which_tokens_there_are_also_under_noise():
    ids = batch(4)
    given = {"words": sent(small(False), ids)["words.weight"]}
    present = ids.unique().tolist()
    for seen in (given, noisy(given, 1e-2), {"turned": given["words"].T}):
        assert tokens_of_tables(seen, VOCABULARY, 32).tolist() == present
    targets = tokens_of_tables({"head": sent(small(True), ids)["head.weight"]}, VOCABULARY, 32)
    assert targets.tolist() == ids[:, 1:].unique().tolist()
    assert tokens_of_tables({"zero": torch.zeros(VOCABULARY, 4)}, VOCABULARY, 32) is None


class Adapted(nn.Linear):
    """A frozen layer beside two small ones."""

    def __init__(self, inner, rank):
        super().__init__(inner.in_features, inner.out_features)
        self.load_state_dict(inner.state_dict())
        self.requires_grad_(False)
        self.first, self.second = nn.Linear(self.in_features, rank, False), nn.Linear(rank, self.out_features, False)
        nn.init.zeros_(self.second.weight)

    def forward(self, x):
        return super().forward(x) + self.second(self.first(x))


def adapted(rank, *, stepped):
    model = small(True).requires_grad_(False)
    for maps in (model.queries, model.keys, model.values, model.up):
        for i, inner in enumerate(maps):
            maps[i] = Adapted(inner, rank)
            if stepped:
                nn.init.normal_(maps[i].second.weight, std=0.02)
    return model


def test_adapters_span_as_much_as_their_rank():
    """14 tokens: rank 4 does not decide, before or after a step; rank 48 does, by the second map first and by the first one then."""
    ids = batch(2)
    for stepped in (False, True):
        with pytest.raises(CannotRead):
            read(low := adapted(4, stepped=stepped), sent(low, ids), 2)
        wide = adapted(48, stepped=stepped)
        found = read(wide, sent(wide, ids), 2)
        assert found.width == (WIDTH if stepped else 48)
        assert score(found.sequences, ids[:, :-1].tolist()).exact == 1
