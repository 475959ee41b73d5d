"""How ranks find each other: every start gets its own store, without the remains of earlier starts."""

import threading
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from quern.mesh import _meet, _open_store, connect
from tests.support.ranks import free_port

SECONDS = timedelta(seconds=20)


def met(store: HashStore, ranks: list[int], of: int) -> dict[int, int]:
    """Returns rank → its count in the store of this start; ranks arrive in the given order."""
    found: dict[int, int] = {}

    def come(rank: int) -> None:
        mine = _meet(store, rank, of, SECONDS)
        found[rank] = mine.add("here", 1)

    threads = []
    for rank in ranks:
        threads.append(threading.Thread(target=come, args=(rank,)))
        threads[-1].start()
        threads[-1].join(0.05)
    for thread in threads:
        thread.join()
    return found


def test_ranks_on_metal_are_refused() -> None:
    with pytest.raises(ValueError, match="several ranks cannot compute on Metal: add --device cpu"):
        connect(1, torch.device("mps"), 0, 2)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_ranks_that_start_anew_meet_among_themselves(order: list[int]) -> None:
    """Also ranks that arrive before rank 0 and find the number of the earlier start."""
    store = HashStore()
    for _ in range(3):
        assert sorted(met(store, order, 3).values()) == [1, 2, 3]


def test_a_start_that_never_was_complete_is_left() -> None:
    store = HashStore()
    with pytest.raises(TimeoutError, match="not all of 2 ranks"):
        _meet(store, 0, 2, timedelta(seconds=0.1))
    assert sorted(met(store, [1, 0], 2).values()) == [1, 2]


def test_a_rank_0_that_never_comes_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    said = r"^rank 0 of 2 did not answer at 127.0.0.1:\d+ within 0 s \(Connection refused\): start it$"
    with pytest.raises(TimeoutError, match=said) as raised:
        _open_store(1, 2, timedelta(seconds=0.3))
    assert isinstance(raised.value.__cause__, ConnectionRefusedError)
    monkeypatch.setenv("MASTER_PORT", "x")
    with pytest.raises(ValueError, match="variable MASTER_PORT is 'x'"):
        _open_store(1, 2, timedelta(seconds=0.3))
