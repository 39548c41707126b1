"""Pinning beside loading: what is full is pinned, once, in pieces that cut no expert; failures keep a usable prefix."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from sglang_ft.experts import slots
from sglang_ft.experts.bank import plan_banks
from sglang_ft.experts.formats import FORMATS, LayerSpec
from sglang_ft.experts.registration import Registration, even_borders, expert_borders
from sglang_ft.experts.slots import RegisteredMemory
from sglang_ft.worker.memory import MemoryFile

PAGE = 4096


class Cuda:
    """Stands for the driver: remembers what is pinned; refuses from `limit` bytes on."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.pinned: set[tuple[int, int]] = set()
        self.ever: list[tuple[int, int]] = []
        self.threads: set[str] = set()
        self.limit = limit
        self._lock = threading.Lock()

    def pin(self, begin: int, end: int) -> str:
        with self._lock:
            if sum(e - b for b, e in self.pinned) + end - begin > self.limit:
                return "out of memory"
            assert not any(b < end and begin < e for b, e in self.pinned), "pinned twice"
            self.pinned.add((begin, end))
            self.ever.append((begin, end))
            self.threads.add(threading.current_thread().name)
            return ""

    def unpin(self, begin: int, end: int) -> None:
        with self._lock:
            self.pinned.remove((begin, end))


def wait_for(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it does not come true")


def test_a_piece_is_pinned_while_later_ones_load():
    cuda = Cuda()
    registration = Registration([0, 100, 200, 300], 0, cuda.pin, cuda.unpin)
    registration.filled(0, 99)
    registration.filled(150, 100)
    assert not cuda.pinned
    registration.filled(99, 51)
    wait_for(lambda: cuda.pinned == {(0, 100), (100, 200)})
    assert registration.finish() == (3, "")
    assert cuda.pinned == {(0, 100), (100, 200), (200, 300)}


def tell(registration: Registration, parts: list[tuple[int, int]]) -> None:
    for begin, end in parts:
        registration.filled(begin, end - begin)


def test_everything_is_pinned_once_whatever_the_order():
    for _ in range(50):
        size, cuda = random.randrange(1, 5000), Cuda()
        cuts = random.sample(range(1, size), min(size - 1, random.randrange(20)))
        borders = sorted({0, size, *cuts})
        registration = Registration(borders, 0, cuda.pin, cuda.unpin)
        parts = even_borders(size, random.randrange(1, 300))
        told = list(zip(parts, parts[1:], strict=False))
        random.shuffle(told)
        told = told[: random.randrange(len(told) + 1)]
        groups = [told[i::3] for i in range(3)]
        threads = [threading.Thread(target=tell, args=(registration, group)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert registration.finish() == (len(borders) - 1, "")
        assert sorted(cuda.ever) == list(zip(borders, borders[1:], strict=False))


def test_padding_that_nobody_fills_holds_nothing_up():
    cuda = Cuda()
    registration = Registration([0, 100, 200], 10, cuda.pin, cuda.unpin)
    registration.filled(0, 90)
    wait_for(lambda: cuda.pinned == {(0, 100)})
    registration.filled(90, 10)
    registration.finish()


@pytest.mark.parametrize("limit", [0, 99, 100, 250, 399, 400])
@pytest.mark.parametrize("order", ["forward", "backward", "none"])
def test_what_is_pinned_in_the_end_is_a_prefix(limit, order):
    cuda = Cuda(limit)
    borders = [0, 100, 200, 300, 400]
    registration = Registration(borders, 0, cuda.pin, cuda.unpin)
    for at in {"forward": [0, 100, 200, 300], "backward": [300, 200, 100, 0], "none": []}[order]:
        registration.filled(at, 100)
    pieces, why = registration.finish()
    assert cuda.pinned == set(zip(borders[:pieces], borders[1 : pieces + 1], strict=True))
    assert (pieces == 4) == (not why) and (limit < 400) == bool(why)
    assert pieces == limit // 100


def test_each_thread_is_prepared():
    cuda, prepared = Cuda(), []
    registration = Registration(
        [0, 1, 2], 0, cuda.pin, cuda.unpin, prepare=lambda: prepared.append(threading.current_thread().name)
    )
    registration.finish()
    assert cuda.threads <= set(prepared) and "MainThread" not in prepared


@pytest.mark.parametrize("size, piece", [(1, 10), (10, 10), (11, 10), (25, 10)])
def test_even_borders(size, piece):
    borders = even_borders(size, piece)
    assert borders[0] == 0 and borders[-1] == size
    assert all(0 < b - a <= piece for a, b in zip(borders, borders[1:], strict=False))


def test_no_border_cuts_an_expert_of_whole_pages():
    for _ in range(30):
        specs = []
        for _ in range(random.randrange(1, 4)):
            spec = LayerSpec(
                random.choice(FORMATS), random.choice([3, 8, 64]), 512, random.choice([64, 96, 256])
            )
            specs += [spec] * random.randrange(1, 4)
        plan = plan_banks(specs)
        largest = max(v.stride for layer in plan.layers for v in layer.roles.values())
        piece = random.randrange(largest, 20 * largest)
        size = plan.nbytes + random.choice([0, 2 << 20])
        borders = expert_borders(plan, size, piece)
        assert borders[0] == 0 and borders[-1] == size and borders == sorted(set(borders))
        assert all(b % 4096 == 0 for b in borders[:-1])
        for layer in plan.layers:
            for view in layer.roles.values():
                if view.stride % 4096:
                    continue
                for border in borders:
                    at = border - view.offset
                    inside = 0 < at < view.stride * layer.spec.num_experts
                    assert not inside or at % view.stride == 0
        gaps = [b - a for a, b in zip(borders, borders[1:], strict=False)]
        assert max(gaps) <= max(piece, 4 << 20) + largest


def test_experts_larger_than_a_piece_get_one_each():
    plan = plan_banks([LayerSpec(FORMATS[0], 4, 512, 256)])
    stride = next(iter(plan.layers[0].roles.values())).stride
    borders = expert_borders(plan, plan.nbytes, piece=stride // 2)
    assert borders[:3] == [0, stride, 2 * stride]


class FakeLibrary:
    """The calls of sgl-ft-kernel that registration makes; a device sees memory at its host address plus `shift`."""

    shift = 1 << 40

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def ft_host_register(self, start, nbytes, chunk, done):
        assert chunk == nbytes, "one registration a call"
        return int(bool(self.cuda.pin(start, start + nbytes)))

    def ft_host_unregister(self, start, nbytes, chunk):
        assert chunk == nbytes
        self.cuda.unpin(start, start + nbytes)
        return 0

    def ft_device_address(self, host, device):
        assert any(begin == host for begin, _ in self.cuda.pinned), "the start of a registration"
        device._obj.value = host + self.shift
        return 0

    def ft_error_text(self, result):
        return b"out of memory"


@pytest.fixture
def registered(monkeypatch):
    """A factory of RegisteredMemory of 10 pages in pieces of 3 or fewer; the driver pins up to `limit` bytes."""

    def make(limit: int = 1 << 60, arrives=lambda offset: True):
        cuda = Cuda(limit)
        monkeypatch.setattr(slots.kernels, "library", lambda: FakeLibrary(cuda))
        monkeypatch.setattr(slots.torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(slots.torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(RegisteredMemory, "_arrives", lambda self, offset: arrives(offset))
        file = MemoryFile("ft-test-registered", 10 * PAGE)
        file.bytes.copy_(torch.randint(0, 256, (file.size,), dtype=torch.uint8))
        memory = RegisteredMemory(file, slots.register(file, even_borders(file.size, 3 * PAGE)))
        return memory, cuda

    return make


def test_registered_memory_is_seen_and_copied_across_its_pieces(registered):
    memory, cuda = registered()
    assert memory.complete and memory.nbytes == 10 * PAGE and not memory.failure
    assert len(cuda.pinned) == 4
    for _ in range(50):
        offset = random.randrange(memory.nbytes)
        assert memory.device_address(offset) == memory.file.address + offset + FakeLibrary.shift
        count = random.randrange(memory.nbytes - offset + 1)
        to = torch.zeros(count, dtype=torch.uint8)
        memory.copy(to, offset)
        assert torch.equal(to, memory.file.bytes[offset : offset + count])
    to = torch.zeros(2, PAGE, dtype=torch.bfloat16)
    memory.copy(to, PAGE)
    assert torch.equal(to.view(torch.uint8).flatten(), memory.file.bytes[PAGE : 5 * PAGE])
    memory.close()
    assert not cuda.pinned and memory.nbytes == 0
    memory.close()


def test_what_the_limit_allows_is_used(registered):
    memory, cuda = registered(limit=7 * PAGE)
    assert memory.nbytes == 6 * PAGE and not memory.complete and memory.failure == "out of memory"
    memory.close()
    assert not cuda.pinned


def test_memory_whose_copies_do_not_arrive_is_given_back(registered):
    memory, cuda = registered(arrives=lambda offset: offset < 6 * PAGE)
    assert memory.nbytes == 6 * PAGE and "do not arrive" in memory.failure
    assert len(cuda.pinned) == 2


def test_the_last_piece_makes_room_for_other_memory(registered):
    memory, cuda = registered()
    sizes = []
    while memory.give_back_last():
        sizes.append(memory.nbytes // PAGE)
        assert sum(end - begin for begin, end in cuda.pinned) == memory.nbytes
    assert sizes == [9, 6, 3, 0] and not cuda.pinned
