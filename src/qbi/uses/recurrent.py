"""Recurrent layers as the linear maps they are made of: each step of time is a use of their weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qbi.uses.kinds import Pairs
from qbi.uses.operations import MAPPED_IN_PARTS, operation
from qbi.uses.watcher import Watcher

Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""From the products of input and state, and the states, to the next states; the first of them is the output."""


def _lstm(arrived: Tensor, kept: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    entry, forget, new, exit_ = (arrived + kept).chunk(4, -1)
    inside = forget.sigmoid() * state[1] + entry.sigmoid() * new.tanh()
    return exit_.sigmoid() * inside.tanh(), inside


def _gru(arrived: Tensor, kept: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (reset, update, new), (reset_, update_, new_) = arrived.chunk(3, -1), kept.chunk(3, -1)
    inside = (new + (reset + reset_).sigmoid() * new_).tanh()
    share = (update + update_).sigmoid()
    return (inside + share * (state[0] - inside),)


def _tanh(arrived: Tensor, kept: Tensor, _state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ((arrived + kept).tanh(),)


def _relu(arrived: Tensor, kept: Tensor, _state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ((arrived + kept).relu(),)


def _product(watcher: Watcher, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return watcher.use(Pairs(tuple(weight.shape)), x, F.linear(x, weight, bias), weight, bias)


def _single(function: Callable[..., Any], cell: Cell, states: int) -> None:
    MAPPED_IN_PARTS.add(function)

    @operation(function)
    def once(
        watcher: Watcher,
        x: Tensor,
        hidden: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        state = tuple(hidden) if states > 1 else (hidden,)
        out = cell(_product(watcher, x, w_ih, b_ih), _product(watcher, state[0], w_hh, b_hh), state)
        return out if states > 1 else out[0]


def _layers(function: Callable[..., Any], cell: Cell, states: int) -> None:
    MAPPED_IN_PARTS.add(function)

    @operation(function)
    def layers(
        watcher: Watcher,
        x: Tensor,
        hidden: Any,
        weights: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: Any = 0.0,
        train: Any = False,
        bidirectional: Any = False,
        batch_first: Any = None,
    ) -> Any:
        if not isinstance(has_biases, bool) or batch_first is None or x.dim() != 3:
            # Packed sequences, and sequences without a batch.
            return NotImplemented
        state = tuple(hidden) if states > 1 else (hidden,)
        each = 4 if has_biases else 2
        ways = 2 if bidirectional else 1
        if len(weights) != each * ways * num_layers:
            return NotImplemented
        groups = [weights[i : i + each] for i in range(0, len(weights), each)]
        out, last = (x.transpose(0, 1) if batch_first else x), []
        for level in range(num_layers):
            parts = []
            for way in range(ways):
                place = level * ways + way
                began = tuple(part[place] for part in state)
                run, end = _run(watcher, cell, out, began, groups[place], backwards=way == 1)
                parts.append(run)
                last.append(end)
            out = torch.cat(parts, -1)
            if dropout and train and level < num_layers - 1:
                out = F.dropout(out, dropout)
        ends = tuple(torch.stack([end[i] for end in last]) for i in range(states))
        return (out.transpose(0, 1) if batch_first else out, *ends)


def _run(
    watcher: Watcher, cell: Cell, x: Tensor, state: tuple[Tensor, ...], weights: Any, *, backwards: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction over all steps of time."""
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    arrived = _product(watcher, x, w_ih, b_ih)
    steps = range(len(x) - 1, -1, -1) if backwards else range(len(x))
    out = []
    for step in steps:
        state = cell(arrived[step], _product(watcher, state[0], w_hh, b_hh), state)
        out.append(state[0])
    return torch.stack(out[::-1] if backwards else out), state


_single(torch.lstm_cell, _lstm, 2)
_single(torch.gru_cell, _gru, 1)
_single(torch.rnn_tanh_cell, _tanh, 1)
_single(torch.rnn_relu_cell, _relu, 1)
_layers(torch.lstm, _lstm, 2)
_layers(torch.gru, _gru, 1)
_layers(torch.rnn_tanh, _tanh, 1)
_layers(torch.rnn_relu, _relu, 1)
