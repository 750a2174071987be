"""Nothing grows with the number of transfers: see leak_runs.py, which also makes long runs."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from conftest import PATIENCE_S, outer_releases
from leak_runs import run
from test_transfer import engines, server  # noqa: F401


@outer_releases
def test_transfers_that_succeed_and_fail_leave_nothing_behind(scene, release):
    run(scene, release, 3400)


def test_what_is_awaited_again_and_again_leaves_no_descriptors(engines):
    first, second = engines
    pending = second.receive(bytearray(1), 0, "late")

    async def main() -> None:
        for _ in range(20):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(result(pending), 0.01)

    async def result(transfer):
        return await transfer

    asyncio.run(main())
    end = time.monotonic() + PATIENCE_S
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < end, f"{before} descriptors became {len(os.listdir('/proc/self/fd'))}"
        time.sleep(0.01)
    assert not pending.done()
    first.send(b"x", 1, "late").wait(PATIENCE_S)
    pending.wait(PATIENCE_S)
