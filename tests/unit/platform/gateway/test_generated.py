"""What a log tells of the blocks that an answer has completed."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.unit.platform.conftest import Counted
from tests.unit.replicas.conftest import make_request
from warmkv.config import GatewayConfig, load
from warmkv.platform.gateway.resume import Sink, resumed
from warmkv.platform.gateway.service import Service
from warmkv.prefixes.hashing import block_hashes
from warmkv.replicas.protocol import Delta, Finished

SIZE = 32


def drawn(tokens):
    """Return the sink of an answer of these tokens, which come in two parts."""

    async def send(attempt):
        for part in (tokens[:20], tokens[20:]):
            yield Delta("x" * len(part), 0, tuple(part))
        yield Finished("length", len(tokens))

    async def play():
        sink = Sink()
        request = make_request([1, 2])
        async for _ in resumed(request, send, GatewayConfig(), lambda when: None, sink=sink):
            pass
        return sink

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("prompt", "answer", "blocks"), [(70, 60, 2), (70, 59, 2), (70, 58, 1), (20, 45, 2), (64, 1, 0)]
)
def test_keys_of_blocks_that_end_within_an_answer_are_logged_where_the_engine_keeps_them(prompt, answer, blocks):
    """The last token has no KV. What is logged are the hashes that the next prompt has."""
    tokens, said, root = list(range(5, 5 + prompt)), list(range(100, 100 + answer)), b"r" * 16
    hashes = block_hashes(tokens, SIZE, root)
    found = []
    for kind, other_from in (("vllm", None), ("vllm", 9), ("warmkv", None)):
        config = load(flags=[f"engine.kind={kind}", f"prefix_cache.block_size={SIZE}"], environ={})
        service = Service(
            config, lambda attempt: None, Counted(), write_log=print, clock=lambda: 0.0, wall_clock=lambda: 0.0
        )
        request = SimpleNamespace(token_ids=tuple(tokens), hashes=tuple(hashes), root=root, other_from=other_from)
        found.append(service._generated(SimpleNamespace(request=request, sink=drawn(said))))
    assert found == [tuple(block_hashes([*tokens, *said, 7], SIZE, root)[len(hashes) : len(hashes) + blocks]), (), ()]
