"""The way of a prompt to its slot and of a token to its client, as docs/architecture.md draws them, in the code."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from tests import hops
from tests.hops import Hop
from tests.unit.platform.exchanges import Exchange, Gateway, message
from warmkv.platform.gateway.replies import Mailbox, Replies
from warmkv.platform.gateway.resume import Attempt
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.outputs import OutputProcessor
from warmkv.replicas.links import Links
from warmkv.replicas.loading.load import load_model, load_tokenizer

THERE, BACK = "### From a request to its slot", "### From a token to its client"
MOST_THERE, MOST_BACK = 40, 20
ON_RAY = {"platform/gateway/deployment.py", "platform/router.py", "replicas/deployment.py", "policies/dispatcher.py"}
ON_RAY |= {"replicas/transfer.py"}
"""Files of hops that need Ray Serve; tests/e2e goes there."""


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
    """Without Ray: an attempt is put where Serve would have called the replica."""
    called = asyncio.run(_answered(tmp_path))
    for heading in (THERE, BACK):
        way = [hop for hop in hops.drawn(heading) if hop.file not in ON_RAY]
        assert hops.first_missing(way, called) is None


async def _answered(folder: Path) -> list[Hop]:
    with hops.calls() as called:
        gateway = Gateway(folder, "engine.threads=1")
        config = gateway.config
        engine = Engine(load_model(config.model), config.engine, config.prefix_cache, clock=time.monotonic, name="only")
        outputs = OutputProcessor(engine, load_tokenizer(config.model).backend_tokenizer, config.gateway.beat_seconds)
        replies, links, sending = Replies("127.0.0.1"), Links(), set[asyncio.Task[None]]()
        await replies.listen()

        def send(attempt: Attempt) -> Mailbox:
            mailbox = replies.mailbox(lambda closed: None, attempt.take)

            async def generate() -> None:
                link = await links.to(mailbox.reply)
                outputs.submit(attempt.request, lambda event: link.send(mailbox.reply.stream, event))

            sending.add(asyncio.ensure_future(generate()))
            return mailbox

        gateway.service._send = send
        thread = threading.Thread(target=engine.run)
        thread.start()
        try:
            exchange = await Exchange(gateway, "/v1/messages", message(gateway, stream=True, max_tokens=16)).whole()
            assert exchange.status == 200
            assert b"message_stop" in exchange.body
        finally:
            engine.stop()
            await asyncio.to_thread(thread.join)
            await links.close()
            replies.close()
    return called
