"""Many simulated clients: waves lose no message, and no worker keeps what its clients had."""

from unittest.mock import Mock

import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.serverapp import Grid

from qbi.lab.federations import Federation, simulate
from qbi.lab.many_clients import Waves, held
from qbi.lab.workers import alone

CLIENTS = 160


def test_waves_send_every_message_once_and_so_many_at_a_time():
    grid = Mock(spec=Grid)
    grid.send_and_receive.side_effect = lambda messages, timeout: list(messages)
    grid.get_node_ids.return_value = [1, 2]
    messages = [Mock(spec=Message) for _ in range(8)]
    waves = Waves(grid, 3)
    assert waves.send_and_receive(iter(messages), timeout=5.0) == messages
    sizes = [(len(call.args[0]), call.kwargs["timeout"]) for call in grid.send_and_receive.call_args_list]
    assert sizes == [(3, 5.0), (3, 5.0), (2, 5.0)]
    assert waves.get_node_ids() == [1, 2]


def test_what_a_worker_held_is_told_apart_by_worker():
    (one, other) = held({7: [20.0, 10.0, 30.0], 8: [5.0] * 20})
    assert one == {"replies": 3, "after a tenth": 10.0, "peak": 30.0}
    assert other == {"replies": 20, "after a tenth": 5.0, "peak": 5.0}


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(900)  # a busy machine takes a few seconds for each client
def test_a_worker_does_not_grow_with_the_clients_it_has_been():
    setting = Federation(
        "two layers", clients=CLIENTS, rounds=1, data="noise", images=20 * CLIENTS, guard=True, wave=40
    )
    run = alone(simulate, setting)
    assert run["answered"] == len(run["bits by client"]) == CLIENTS
    model = sum(p.numel() * p.element_size() for p in setting.model().parameters()) / 2**20
    assert sum(worker["replies"] for worker in run["workers"]) == CLIENTS
    for worker in run["workers"]:
        # Who kept one state for each client would grow by a whole model with each.
        later = worker["replies"] - worker["replies"] // 10
        assert worker["peak"] - worker["after a tenth"] < later * model / 2
        assert worker["peak"] < 2048
