"""Which cores the server's own threads keep to."""

import threading

from sglang_ft.worker import topology


def test_the_server_s_threads_leave_the_worker_s_cores(monkeypatch):
    moved = {}
    monkeypatch.setattr(topology.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(topology.os, "sched_setaffinity", moved.__setitem__)
    topology.keep_off([1, 2, 3])
    assert not moved, "one core is too few"
    topology.keep_off([2, 3])
    assert moved and all(cores == {0, 1} for cores in moved.values())
    assert threading.get_native_id() in moved
