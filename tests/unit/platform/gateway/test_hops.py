"""The way of a prompt to its slot and of a token to its client, as docs/architecture.md draws them, in the code."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from random import Random

from tests import hops
from tests.hops import Hop
from tests.unit.platform.exchanges import Exchange, Gateway, Recorded, message
from warmkv.platform.gateway.replies import Replies
from warmkv.platform.gateway.sending import Sender
from warmkv.platform.router import Router
from warmkv.policies.transfer import TransferTerms
from warmkv.replicas.answers import Answers
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.outputs import OutputProcessor
from warmkv.replicas.links import Links
from warmkv.replicas.loading.load import load_model
from warmkv.replicas.loading.tokenizer import load_tokenizer
from warmkv.replicas.protocol import BlocksWanted
from warmkv.replicas.transfer import BlockPayloads, Transfers

THERE, BACK = "### From a request to its slot", "### From a token to its client"
MOST_THERE, MOST_BACK = 40, 20


def test_every_hop_exists():
    for heading, most in ((THERE, MOST_THERE), (BACK, MOST_BACK)):
        way = hops.drawn(heading)
        assert hops.unknown(way) == []
        assert 10 < len(way) == len(set(way)) <= most


def test_a_way_that_is_not_gone_is_found():
    way = [Hop("a.py", "one"), Hop("a.py", "two")]
    assert hops.first_missing(way, [way[0], Hop("a.py", "other"), way[1]]) is None
    assert hops.first_missing(way, [way[1], way[0]]) == way[1]
    assert hops.unknown([Hop("faults.py", "nothing"), Hop("faults.py", "UserError")]) == [Hop("faults.py", "nothing")]


def test_a_request_goes_the_way_that_is_drawn(tmp_path: Path):
    called = asyncio.run(_answered(tmp_path))
    for heading in (THERE, BACK):
        assert hops.first_missing(hops.drawn(heading), called) is None


async def _answered(folder: Path) -> list[Hop]:
    with hops.calls() as called:
        gateway = Gateway(folder, "engine.threads=1")
        config = gateway.config
        engine = Engine(load_model(config.model), config.engine, config.prefix_cache, clock=time.monotonic, name="only")
        outputs = OutputProcessor(engine, load_tokenizer(config.model).backend_tokenizer, config.gateway.beat_seconds)
        transfers = Transfers(engine, "only", TransferTerms.of(config), unasked, Recorded(), clock=time.monotonic)
        answers = Answers(outputs, transfers, lambda: None, config.ongoing_requests)
        links = Links("only", answers.take, answers.lost)
        replies = Replies("127.0.0.1")
        router = Router(config, Recorded(), Random(0), time.monotonic)
        sender = Sender(config, router, replies, time.monotonic)
        await replies.listen()
        await links.to(replies.address)
        sender.follow({"only": ""})
        gateway.service._send = sender.send
        thread = threading.Thread(target=engine.run)
        thread.start()
        try:
            exchange = await Exchange(
                gateway, "/v1/messages", message(gateway, stream=True, max_tokens=64, warmkv={"ignore_eos": True})
            ).whole()
            assert exchange.status == 200
            assert b"message_stop" in exchange.body
        finally:
            engine.stop()
            await asyncio.to_thread(thread.join)
            await links.close()
            replies.close()
    return called


async def unasked(wanted: BlocksWanted) -> BlockPayloads:
    raise AssertionError("there is no other replica")
