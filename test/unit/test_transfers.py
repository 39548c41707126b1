"""Many reads at once: the same bytes by io_uring and by threads, and an end for every read."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_ft.errors import CheckpointError
from sglang_ft.weights import transfers
from sglang_ft.weights.reader import FileReader
from sglang_ft.weights.transfers import ALIGN, READS, Transfers, aligned_buffer
from sglang_ft.worker import native

SIZE = 3 * 1024 * 1024 + 517
DATA = random.randbytes(SIZE)
BUFFER = 64 << 10


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("transfers") / "data"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def file(path):
    reader = FileReader(path)
    yield reader
    reader.close()


def offers_io_uring() -> bool:
    error = ctypes.c_int()
    queue = native.client().reads_open(1, ctypes.byref(error))
    if queue:
        native.client().reads_close(queue)
    return bool(queue)


@pytest.fixture(params=["by the kernel", "by threads"])
def pool(request):
    by_kernel = request.param == "by the kernel"
    if by_kernel and not offers_io_uring():
        pytest.skip("this system offers no io_uring")
    pool = Transfers(BUFFER, by_kernel)
    assert pool.by_kernel == by_kernel
    yield pool
    pool.close()


def test_random_reads_bring_what_is_there(pool, file):
    wrong, futures = [], []
    for _ in range(500):
        offset = random.choice([random.randrange(SIZE), random.randrange(SIZE // ALIGN) * ALIGN])
        nbytes = min(random.choice([1, 511, ALIGN, 20_000, BUFFER, 3 * BUFFER]), SIZE - offset)

        def done(data: torch.Tensor, offset: int = offset, nbytes: int = nbytes) -> None:
            if bytes(data.numpy()) != DATA[offset : offset + nbytes]:
                wrong.append((offset, nbytes))

        if random.random() < 0.5:
            futures.append(pool.submit_into_buffer(file, offset, nbytes, done))
        else:
            begin = random.choice([0, 0, 8])
            to = aligned_buffer(nbytes + begin)[begin:]
            futures.append(pool.submit(file, offset, to, done))
    for future in futures:
        future.result(timeout=60)
    assert not wrong


def test_a_read_past_the_end_fails_alone_with_its_name(pool, file):
    good = pool.submit_into_buffer(file, 0, 100, lambda data: None)
    bad = pool.submit_into_buffer(file, SIZE - 10, 20, lambda data: None, "the tensor")
    also = pool.submit_into_buffer(file, 0, 2 * SIZE, lambda data: None)
    with pytest.raises(CheckpointError, match=f"the tensor: .*ends at offset {SIZE}"):
        bad.result(timeout=60)
    with pytest.raises(CheckpointError, match="ends at offset"):
        also.result(timeout=60)
    good.result(timeout=60)


def test_what_is_done_with_a_read_may_fail(pool, file):
    def done(data):
        raise ValueError("no")

    bad = [pool.submit_into_buffer(file, 0, 100, done) for _ in range(50)]
    good = pool.submit_into_buffer(file, 0, 100, lambda data: None)
    for future in bad:
        with pytest.raises(ValueError):
            future.result(timeout=60)
    good.result(timeout=60)


def test_a_read_without_memory_for_it_ends(pool, file, monkeypatch):
    def no_memory(nbytes):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(transfers, "aligned_buffer", no_memory)
        with pytest.raises(OSError, match="memory"):
            pool.submit_into_buffer(file, 0, 2 * BUFFER, lambda data: None).result(timeout=60)
    pool.submit_into_buffer(file, 0, 100, lambda data: None).result(timeout=60)


def test_close_ends_what_is_under_way_and_cancels_the_rest(pool, file):
    begun, go = threading.Semaphore(0), threading.Event()

    def done(data):
        begun.release()
        go.wait()

    futures = [pool.submit_into_buffer(file, 0, 100, done) for _ in range(100)]
    begun.acquire()
    closing = threading.Thread(target=pool.close)
    closing.start()
    while not pool._closed:
        pass
    go.set()
    closing.join(60)
    assert all(future.done() for future in futures)
    cancelled = 0
    for future in futures:
        try:
            future.result()
        except CancelledError:
            cancelled += 1
    assert 100 - 2 * READS <= cancelled < 100
    pool._threads.clear()  # the fixture closes it again


def test_without_io_uring_a_thread_reads_each(file, monkeypatch):
    def refuse(depth, error):
        error._obj.value = errno.EPERM

    real = native.client()
    fake = SimpleNamespace(**{**vars(real), "reads_open": refuse})
    monkeypatch.setattr(transfers.native, "client", lambda: fake)
    pool = Transfers(BUFFER)
    assert not pool.by_kernel and len(pool._threads) == READS
    pool.submit_into_buffer(file, 5, 100, lambda data: None).result(timeout=60)
    pool.close()


@pytest.mark.parametrize("given", [-errno.EIO, -errno.EINVAL, 0, 1, ALIGN, ALIGN + 1, 3 * ALIGN])
def test_what_the_kernel_leaves_is_read_by_the_thread(file, monkeypatch, given):
    if not offers_io_uring():
        pytest.skip("this system offers no io_uring")
    real = native.client()

    def wait(queue, tag, got):
        real.reads_wait(queue, tag, got)
        got._obj.value = given

    monkeypatch.setattr(
        transfers.native, "client", lambda: SimpleNamespace(**{**vars(real), "reads_wait": wait})
    )
    pool = Transfers(BUFFER)
    got = []
    pool.submit_into_buffer(file, 2 * ALIGN, BUFFER, lambda data: got.append(bytes(data.numpy()))).result(
        timeout=60
    )
    pool.close()
    assert got == [DATA[2 * ALIGN : 2 * ALIGN + BUFFER]]


def test_a_queue_says_when_it_is_full(path):
    if not offers_io_uring():
        pytest.skip("this system offers no io_uring")
    client, error = native.client(), ctypes.c_int()
    queue = client.reads_open(2, ctypes.byref(error))
    fd = os.open(path, os.O_RDONLY)
    buffer = aligned_buffer(3 * ALIGN)
    tag, got = ctypes.c_uint64(), ctypes.c_int32()
    for slot in range(2):
        assert client.reads_begin(queue, fd, slot * ALIGN, buffer.data_ptr() + slot * ALIGN, ALIGN, slot) == 0
    assert client.reads_begin(queue, fd, 0, buffer.data_ptr(), ALIGN, 9) == errno.EBUSY
    seen = set()
    for _ in range(2):
        client.reads_wait(queue, ctypes.byref(tag), ctypes.byref(got))
        seen.add((tag.value, got.value))
    assert seen == {(0, ALIGN), (1, ALIGN)}
    assert bytes(buffer[: 2 * ALIGN].numpy()) == DATA[: 2 * ALIGN]
    client.reads_close(queue)
    os.close(fd)


def test_buffers_begin_on_a_huge_page():
    for nbytes in (1, 4096, 3 << 20):
        buffer = aligned_buffer(nbytes)
        assert buffer.numel() == nbytes and buffer.data_ptr() % (2 << 20) == 0
        buffer.fill_(1)
