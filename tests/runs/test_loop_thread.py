"""An event loop in a thread: results, errors, interruptions and the end."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from shoal.errors import RunError
from shoal.runs.loop_thread import LoopThread


async def thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def fail() -> None:
    raise ZeroDivisionError


async def last(ended: threading.Event) -> None:
    try:
        await asyncio.sleep(60.0)
    finally:
        ended.set()


def test_results_and_errors_reach_the_caller() -> None:
    thread = LoopThread("work")
    assert thread.wait(thread_name()) == "work"
    with pytest.raises(ZeroDivisionError):
        thread.wait(fail())

    async def call() -> str:
        with pytest.raises(ZeroDivisionError):
            await thread.call(fail())
        return await thread.call(thread_name())

    assert asyncio.run(call()) == "work"
    thread.stop()


def test_a_cancelled_caller_cancels_the_call() -> None:
    thread, ended = LoopThread("work"), threading.Event()

    async def give_up() -> None:
        async with asyncio.timeout(0.05):
            await thread.call(last(ended))

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert ended.wait(10.0)
    thread.stop()


def test_stop_cancels_what_is_left() -> None:
    thread, ended = LoopThread("work"), threading.Event()
    thread.start(last(ended))
    thread.wait(thread_name())
    thread.stop()
    assert ended.is_set()
    assert not thread.is_running
    with pytest.raises(RunError, match="the thread is closed; open a new one"):
        thread.wait(thread_name())
    thread.stop()


def test_it_can_be_stopped_from_its_own_thread() -> None:
    thread = LoopThread("work")

    async def stop() -> None:
        thread.stop()

    thread.start(stop())
    limit = time.monotonic() + 10.0
    while thread.is_running:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_forked_process_does_not_wait_for_it() -> None:
    thread = LoopThread("work")
    child = os.fork()
    if child == 0:
        try:
            thread.wait(thread_name())
        except RunError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    thread.stop()
