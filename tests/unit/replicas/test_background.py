import asyncio

import pytest

from warmkv.replicas.background import Background


def test_a_task_that_fails_is_told_and_one_that_returns_or_is_cancelled_is_not():
    async def fails() -> None:
        raise ValueError("no more")

    async def returns() -> None:
        pass

    async def run() -> None:
        background = Background()
        background.start("returning", returns())
        background.start("waiting", asyncio.Event().wait())
        await asyncio.sleep(0)
        background.check()
        background.start("counting", fails())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="counting failed: ValueError: no more"):
            background.check()
        background.cancel()
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="counting failed"):
            background.check()

    asyncio.run(run())
