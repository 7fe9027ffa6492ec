"""What may leave a client: released states and numbers that the owner named, in whatever words; nothing else."""

import math
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qbi.errors import BadValue, QbiError
from qbi.private import Boundary, BudgetSpent, Ledger, NotReleased, Private
from qbi.private.allowed import read_names
from qbi.private.boundary import THREE_LINES, current, inside
from qbi.private.goal import Budget
from qbi.private.keystream import repeated_keys
from qbi.private.site import Reply, SiteSettings, guarded_round
from qbi.private.update import ReleasedUpdate

X, Y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    return model


SENT = {n: v.clone() for n, v in make().state_dict().items()}


def trained(model, steps=2, **settings):
    private = Private(model, F.cross_entropy, bits=10, batch_size=16, **settings)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        private.step(optimiser, X, Y)
    return private


def test_what_a_private_training_released_may_leave():
    with inside(Boundary(SENT)) as boundary:
        private = trained(make(), average=0.9)
        state = private.state_dict()
        boundary.check_arrays(state)
        boundary.check_arrays(private.state_dict(averaged=True))
        boundary.check_arrays({n: p.grad for n, p in private.model.named_parameters()})
        floats = [n for n in state if state[n].is_floating_point()]
        difference = {n: state[n] - SENT[n] if n in floats else SENT[n] for n in state}
        boundary.check_arrays(difference)
        boundary.check_arrays({n: SENT[n] - state[n] if n in floats else SENT[n] for n in state})
        boundary.check_arrays(SENT)
        boundary.check_arrays({str(i): v for i, v in enumerate(state.values())})
    assert current() is None


def test_what_was_loaded_is_not_released_by_having_been_loaded():
    """Through the public API alone: anything that was loaded into a private training left, once that was admitted."""
    secret = {n: torch.full_like(v, 4711) for n, v in SENT.items()}
    with inside(Boundary(SENT)) as boundary:
        private = trained(make())
        before = private.state_dict()
        with pytest.raises(NotReleased):
            private.load_state_dict(secret)
        refused = []

        def elsewhere():  # a thread has no context of its own
            try:
                private.load_state_dict(secret)
            except NotReleased as problem:
                refused.append(problem)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert refused
        assert all(torch.equal(v, before[n]) for n, v in private.model.state_dict().items())
        boundary.check_arrays(private.state_dict())
        with pytest.raises(NotReleased):
            boundary.check_arrays(secret)
        private.load_state_dict(SENT)
        boundary.check_arrays(private.state_dict())


def test_a_refused_load_does_not_make_public_what_was_written_by_hand():
    with inside(Boundary(SENT)) as boundary:
        private = trained(make())
        before = private.state_dict()
        private.model[0].weight.data.fill_(4711)
        with pytest.raises(NotReleased):
            private.load_state_dict({n: torch.full_like(v, 3) for n, v in SENT.items()})
        assert torch.equal(private.model[0].weight, before["0.weight"])
        private.step(torch.optim.SGD(private.model.parameters(), lr=0.0), X, Y)
        assert torch.equal(boundary.check_arrays(private.state_dict())["0.weight"], before["0.weight"])


def test_of_which_state_each_array_is_cannot_be_chosen():
    """One bit an array, and more where earlier states were kept releasable by trainings that train nothing."""
    with inside(Boundary(SENT)) as boundary:
        private = trained(make(), steps=1)
        first = private.state_dict()
        keeper = make()
        keeper.load_state_dict(first)
        kept = Private(keeper)
        boundary.check_arrays(kept.state_dict())
        with pytest.raises(NotReleased):
            boundary.check_arrays({**first, "0.weight": SENT["0.weight"]})
        with pytest.raises(NotReleased, match="not of the same state"):
            kept.load_state_dict({**first, "0.weight": SENT["0.weight"]})
        last = trained(keeper, steps=1)
        with pytest.raises(NotReleased):
            boundary.check_arrays(first)
        with pytest.raises(NotReleased):
            last.load_state_dict(first)
        boundary.check_arrays(last.state_dict())


def test_noise_from_a_seed_does_not_leave():
    repeated = Private(make(), bits=10)
    repeated._repeat(3)
    with inside(Boundary(SENT)):
        with pytest.raises(NotReleased, match="seed"):
            repeated.load_state_dict(SENT)
        with pytest.raises(NotReleased, match="seed"):
            Private(make(), bits=10)._repeat(3)


def changed(state, name="0.weight"):
    out = {n: v.clone() for n, v in state.items()}
    out[name].view(-1)[0] = out[name].view(-1)[0].nextafter(torch.tensor(9.0))
    return out


CHANGES = {
    "one bit": changed,
    "a buffer": lambda s: {**s, "count": s["count"] + 1},
    "one array less": lambda s: {n: v for n, v in s.items() if n != "0.bias"},
    "one array more": lambda s: {**s, "more": torch.zeros(3)},
    "another name": lambda s: {n.replace("0.", "9."): v for n, v in s.items()},
    "NaN": lambda s: {**s, "0.bias": s["0.bias"] * math.nan},
    "another precision": lambda s: {n: v.double() if v.is_floating_point() else v for n, v in s.items()},
    "two arrays swapped": lambda s: {**s, "0.weight": s["0.weight"].flip(0)},
    "half old, half new": lambda s: {**s, "0.weight": s["0.weight"] + 0 * s["0.weight"] + 1e-9},
}


@pytest.mark.parametrize("name", CHANGES)
def test_anything_else_may_not(name):
    with inside(Boundary(SENT)) as boundary:
        state = trained(make()).state_dict()
        with pytest.raises(NotReleased):
            boundary.check_arrays(CHANGES[name](state))


def test_plain_training_is_told_the_three_lines():
    with inside(Boundary(SENT)) as boundary:
        model = make()
        F.cross_entropy(model(X), Y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(NotReleased) as refused:
            boundary.check_arrays(model.state_dict())
    assert THREE_LINES in str(refused.value)


def test_earlier_states_may_not_leave():
    """Which one to send could be chosen by the data."""
    with inside(Boundary(SENT)) as boundary:
        private = trained(make(), steps=1)
        early = private.state_dict()
        private.step(torch.optim.SGD(private.model.parameters(), lr=0.1), X, Y)
        with pytest.raises(NotReleased):
            boundary.check_arrays(early)


def test_a_private_training_begins_with_what_was_sent():
    with inside(Boundary(SENT)):
        with pytest.raises(NotReleased, match="not what the server sent"):
            Private(make(1))
        model = make()
        F.cross_entropy(model(X), Y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(NotReleased):
            Private(model)
        first = trained(make())
        Private(first.model)  # from what was released


def test_numbers_leave_if_the_owner_named_them_and_are_charged():
    boundary = Boundary(SENT, read_names("accuracy:7 loss:8:10 raw num-examples=5"), limit=100)
    out = boundary.check_numbers(
        {"accuracy": 0.123456, "loss": 123.0, "num-examples": 731, "correct": 17, "names": "Mr Smith", "raw": 0.1}
    )
    assert out == {"accuracy": round(0.123456 * 127) / 127, "loss": 10.0, "num-examples": 5, "raw": 0.1}
    assert boundary.spent == 7 + 8 + 64 + 8 + 3  # and what kind of value, and that they are there
    with pytest.raises(BudgetSpent):
        boundary.check_numbers({"raw": [0.1, 0.2]})


@pytest.mark.parametrize("text", ["a:b", "a:0", "a:40", "a=x", "a:3:-1"])
def test_rules_for_numbers_that_make_no_sense(text):
    with pytest.raises(BadValue, match="metrics"):
        read_names(text)


def test_numbers_of_bits_have_so_many_values():
    rule = read_names("accuracy:3")["accuracy"]
    values = {rule.let_out(v)[0] for v in (*torch.linspace(-1, 2, 1000).tolist(), math.nan, math.inf)}
    assert len(values) == 8


def plain_training(seed=0):
    model = make(seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimiser.step()
    with torch.no_grad():
        model.count += 3
    return model.state_dict()


def test_an_update_is_clipped_and_noisy_on_the_grid():
    """σ·C on every value, the direction of the update, counters as sent."""
    budget = Budget.for_goal(bits=72, clip=0.5)
    returned = plain_training()
    released = ReleasedUpdate(budget, keys=repeated_keys(0)).release(SENT, returned)
    moved = torch.cat([(released[n] - SENT[n]).flatten() for n in SENT if SENT[n].is_floating_point()])
    true = torch.cat([(returned[n] - SENT[n]).flatten() for n in SENT if SENT[n].is_floating_point()])
    noise = moved - true * (0.5 / true.norm())
    assert float(true.norm()) > 0.5
    assert float(noise.std()) == pytest.approx(0.05, rel=0.25)
    assert int(released["count"]) == 0


def test_an_update_moves_no_further_than_its_sensitivity():
    """Whatever the training returned, two updates under one key differ by two clips at most; NaN counts as nothing."""
    budget = Budget.for_goal(bits=72, clip=0.5)

    def leaves(state):
        out = ReleasedUpdate(budget, keys=repeated_keys(0)).release(SENT, state)
        return torch.cat([out[n].double().flatten() for n in SENT if SENT[n].is_floating_point()])

    huge = {n: v * 1e30 if v.is_floating_point() else v for n, v in plain_training().items()}
    wrong = {n: v * math.nan if v.is_floating_point() else v for n, v in plain_training().items()}
    states = [SENT, plain_training(), huge, wrong]
    for a in states:
        for b in states:
            assert float((leaves(a) - leaves(b)).norm()) <= 2 * 0.5 * 1.002
    assert torch.equal(leaves(wrong), leaves(SENT))


@pytest.mark.parametrize("wrong", ["one array less", "one array more", "another name"])
def test_an_update_of_another_form_is_refused(wrong):
    with pytest.raises(NotReleased):
        ReleasedUpdate(Budget.for_goal()).release(SENT, CHANGES[wrong](plain_training()))


def test_a_round_is_charged_to_the_ledger_once_for_each_update(tmp_path):
    settings = SiteSettings(policy="update", bits=100, total=250, ledger=str(tmp_path / "l"), inspect="off")
    reply = lambda: Reply({"arrays": plain_training()}, {"metrics": {"loss": 1.0, "num-examples": 16}})  # noqa: E731
    for _ in range(2):
        passed = guarded_round(settings, SENT, reply, trains=True)
        assert passed.reply.numbers == {"metrics": {"num-examples": 1}}
    with pytest.raises(BudgetSpent):
        guarded_round(settings, SENT, reply, trains=True)
    assert sum(e.bits for e in Ledger(tmp_path / "l").entries()) == pytest.approx(200)


@pytest.mark.parametrize("trains", [True, False])
def test_outside_of_training_no_update_is_released(trains):
    settings = SiteSettings(policy="update", inspect="off")
    work = lambda: Reply({"arrays": plain_training()}, {})  # noqa: E731
    if trains:
        assert guarded_round(settings, SENT, work, trains=True).bits == pytest.approx(72)
    else:
        with pytest.raises(NotReleased):
            guarded_round(settings, SENT, work, trains=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"qbi-policy": "budget"}, "qbi.Private"),
        ({"qbi-policy": "auto"}, "defended_step"),
        ({"qbi-bits": "many"}, "no number"),
        ({"qbi-inspect": "maybe"}, "refuse, warn, off"),
        ({"qbi-polcy": "update"}, "no such setting"),
        ({"qbi-metrics": "a:99"}, "bits go from"),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises(QbiError, match=words):
        SiteSettings.of(settings)


def test_steps_in_a_thread_are_charged_where_they_were_admitted():
    from concurrent.futures import ThreadPoolExecutor

    def work():
        model = make()
        private = Private(model, bits=40, total=1e9, batch_size=16)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        with ThreadPoolExecutor(1) as pool:
            for _ in range(3):
                pool.submit(private.step, optimiser, X, Y).result()
        return Reply({"arrays": private.state_dict()}, {})

    with pytest.raises(BudgetSpent):
        guarded_round(SiteSettings(total=100, inspect="off"), SENT, work, trains=True)
    assert guarded_round(SiteSettings(total=121, inspect="off"), SENT, work, trains=True).bits == pytest.approx(120)


def test_writing_into_what_was_released_changes_nothing():
    with inside(Boundary(SENT)) as boundary:
        private = trained(make())
        private.released()[0]["0.weight"].fill_(7.0)
        boundary.check_arrays(private.state_dict())
        assert float(private.state_dict()["0.weight"].max()) < 7


def test_what_was_sent_is_a_copy():
    """A model that took the arrays themselves, and moved them, does not pass for what was sent."""
    sent = {n: v.clone() for n, v in SENT.items()}

    def work():
        model = make()
        model.load_state_dict(sent, assign=True)
        with torch.no_grad():
            model[0].weight += X[0, :1]
        return Reply({"arrays": model.state_dict()}, {})

    with pytest.raises(NotReleased):
        guarded_round(SiteSettings(inspect="off"), sent, work, trains=True)


def test_a_body_that_saw_data_is_not_frozen_into_the_start():
    model = make()
    F.cross_entropy(model(X), Y).backward()
    torch.optim.SGD(model[0].parameters(), lr=1.0).step()
    model[0].requires_grad_(False)
    with inside(Boundary(SENT)), pytest.raises(NotReleased, match=r"0\.weight"):
        Private(model)


def test_charges_of_a_refused_round_are_told():
    told = []

    def work():
        trained(make(), steps=3)
        raise KeyError("after the steps")

    with pytest.raises(KeyError):
        guarded_round(SiteSettings(inspect="off"), SENT, work, trains=True, told=told.append)
    assert sum(told) == pytest.approx(30)


@pytest.mark.parametrize("value", [torch.zeros(9), {"a": 1}, {1, 2}, object()])
def test_values_of_other_kinds_do_not_leave(value):
    with pytest.raises(NotReleased):
        Boundary(SENT, read_names("raw")).check_numbers({"raw": value})


def test_large_numbers_are_charged_for_what_they_say():
    boundary = Boundary(SENT, read_names("raw"))
    boundary.check_numbers({"raw": 10**3000})
    assert boundary.spent > 9000


def test_another_round_changes_nothing_of_what_this_one_released():
    """What a round calls sent is the app's word: a training that moved on to it is no longer this round's."""
    raw = {n: torch.full_like(v, 4711) for n, v in SENT.items()}
    with inside(Boundary(SENT)) as first:
        private = trained(make())
        state = private.state_dict()
    with inside(Boundary(raw)):
        private.load_state_dict(raw)
    with pytest.raises(NotReleased):
        first.check_arrays(private.state_dict())
    first.check_arrays(state)
    with inside(Boundary(SENT)) as outer:
        private = trained(make())
        with inside(Boundary(raw)):
            private.load_state_dict(raw)
            private.step(torch.optim.SGD(private.model.parameters(), lr=0.1), X, Y)
        with pytest.raises(NotReleased):
            outer.check_arrays(private.state_dict())


def test_names_say_nothing_that_was_not_sent():
    with inside(Boundary(SENT)):
        private = trained(make())
        private.model.add_module("patient 4711", private.model[0])
        with pytest.raises(NotReleased, match="patient"):
            private.load_state_dict(private.model.state_dict())
    unnamed = {str(i): v for i, v in enumerate(SENT.values())}
    with inside(Boundary(unnamed)) as boundary:
        model = make()
        private = trained(model)
        assert [*boundary.check_arrays(private.state_dict())] == [*unnamed]
        assert [*boundary.sent] == [*unnamed]


def test_shapes_and_types_are_those_that_were_sent():
    with inside(Boundary(SENT)) as boundary:
        private = trained(make())
        private.model[0].weight.data = private.model[0].weight.data.reshape(2, 4, 2, 3)
        with pytest.raises(NotReleased):
            boundary.check_arrays({n: g for s in private.released()[-1:] for n, g in s.items()})


def test_momentum_of_steps_that_nobody_paid_for_stays_out():
    model = make()
    private = Private(model, F.cross_entropy, bits=10, batch_size=16)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.99)
    private.step(optimiser, X, Y)
    with inside(Boundary(SENT)):
        private.load_state_dict(SENT)
        with pytest.raises(BadValue, match="Create the optimiser anew"):
            private.step(optimiser, X, Y)
        private.step(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), X, Y)


def test_a_penalty_that_writes_weights_moves_nothing():
    def penalty(model):
        with torch.no_grad():
            model[0].weight.fill_(4711)
        return model[0].weight.sum() * 0

    with inside(Boundary(SENT)):
        assert trained(make(), penalty=penalty).state_dict()["0.weight"].abs().max() < 100


def test_a_pass_that_began_outside_is_charged_by_the_owners_name_and_limit(tmp_path):
    book = Ledger(tmp_path / "ledger")
    model = make()
    private = Private(model, F.cross_entropy, bits=50, total=1e9, ledger=book)
    batches = private.batches((X, Y), batch_size=16)
    x, y = next(batches)
    charged = []
    with inside(Boundary(SENT, pay=charged.append, limit=100, ledger=book.path.resolve())):
        private.load_state_dict(SENT)
        private.step(torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    assert charged == [pytest.approx(50, rel=1e-6)]


@pytest.mark.parametrize("reply", [Reply({"a": SENT, "b": SENT}, {}), Reply({}, {str(i): {} for i in range(9)})])
def test_a_reply_of_many_records_stays(reply):
    with pytest.raises(NotReleased, match="records"):
        guarded_round(SiteSettings.of({}), SENT, lambda: reply, trains=True)


def layered(order):
    made = nn.Module()
    for i in order:
        made.add_module(f"l{i}", nn.Linear(6, 6, bias=False))
    made.forward = lambda x: sum(getattr(made, f"l{i}")(x) for i in range(4))  # type: ignore[method-assign]
    return made


def test_a_second_training_does_not_put_arrays_without_names_into_an_order_of_its_own():
    first = layered(range(4))
    sent = {str(i): v.clone() for i, v in enumerate(first.state_dict().values())}
    with inside(Boundary(sent)) as here:
        private = Private(first, F.cross_entropy, bits=72, batch_size=8)
        private.step(torch.optim.SGD(first.parameters(), lr=0.1), torch.rand(8, 6), torch.arange(8) % 6)
        released = private.state_dict()
        second = layered([2, 0, 3, 1])
        second.load_state_dict(released)
        other = Private(second, F.cross_entropy, bits=72).state_dict()
        with pytest.raises(NotReleased):
            here.check_arrays({str(i): v for i, v in enumerate(other.values())})
        out = here.check_arrays({str(i): v for i, v in enumerate(released.values())})
        assert all(torch.equal(a, b) for a, b in zip(out.values(), released.values(), strict=True))


def test_a_trained_weight_that_the_state_does_not_name_is_refused_in_a_round():
    class Local(nn.Linear):
        def state_dict(self, *args, **kwargs):
            found = super().state_dict(*args, **kwargs)
            found.pop("bias")
            return found

    model = Local(12, 3)
    with (
        inside(Boundary({"weight": model.weight.detach().clone()})),
        pytest.raises(NotReleased, match="“bias” is trained"),
    ):
        Private(model, F.cross_entropy, bits=72)


def test_what_leaves_is_ours_whatever_is_written_into_the_reply_afterwards():
    with inside(Boundary(SENT)) as here:
        reply = trained(make()).state_dict()
        out = here.check_arrays(reply)
        before = {n: v.clone() for n, v in out.items()}
        for value in reply.values():
            value.fill_(4711)
        assert all(torch.equal(out[n], v) for n, v in before.items())


def test_a_load_that_is_interrupted_makes_nothing_public(monkeypatch):
    model = make()
    with inside(Boundary(SENT)) as here:
        private = Private(model, F.cross_entropy, bits=72, batch_size=16)
        begun = private.state_dict()

        def interrupted(*_given):
            raise KeyboardInterrupt

        monkeypatch.setattr(here, "admit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            private.load_state_dict({n: v + 1 for n, v in SENT.items()})
        assert all(torch.equal(v, begun[n]) for n, v in private.state_dict().items())


def test_one_ledger_with_two_names_is_charged_under_both_and_the_smaller_total_ends_it(tmp_path):

    def round_of(data, total):
        def work():
            model = make()
            private = Private(model, F.cross_entropy, bits=72, ledger=str(tmp_path / data), data=data, total=total)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in private.batches((X, Y), batch_size=16):
                private.step(optimiser, x, y)
            return Reply({"arrays": private.state_dict()}, {})

        settings = SiteSettings(inspect="off", ledger=str(tmp_path / data), data="clinic")
        return guarded_round(settings, SENT, work, trains=True)

    for data, expected in (("patients", {"clinic": 72, "patients": 72}), ("clinic", {"clinic": 72})):
        round_of(data, 100)
        spent: dict[str, float] = {}
        for entry in Ledger(tmp_path / data).entries():
            spent[entry.data] = spent.get(entry.data, 0) + entry.bits
        assert spent == pytest.approx(expected)
        with pytest.raises(BudgetSpent, match=data):
            round_of(data, 100)


def test_an_update_leaves_in_the_order_in_which_it_was_sent():
    from_app = {n: v + 0.01 for n, v in reversed(list(SENT.items()))}
    released = ReleasedUpdate(Budget.for_goal(bits=72)).release(SENT, from_app)
    assert list(released) == list(SENT)
    unnamed = {str(i): v for i, v in enumerate(SENT.values())}
    assert list(ReleasedUpdate(Budget.for_goal(bits=72)).release(SENT, unnamed)) == list(unnamed)
