"""Tokens and context of a measured step mean what the simulator means by them."""

import pytest

from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.measuring import grid, synthetic
from warmkv.measuring.grid import Chunk, Decode
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine


def test_chunks_come_whole_and_in_parts_at_every_end():
    assert grid.chunks([32, 128], 64) == [
        Chunk(8, 32),
        Chunk(16, 32),
        Chunk(32, 32),
        Chunk(8, 128),
        Chunk(16, 128),
        Chunk(32, 128),
        Chunk(64, 128),
    ]


def test_batches_take_turns_with_shares():
    cells = grid.decodes([64, 128], [1, 4])
    assert {(cell.prompt, cell.batch) for cell in cells} == {(64, 1), (64, 4), (128, 1), (128, 4)}
    assert {cell.share for cell in cells if cell.prompt == 64} == set(grid.SHARES)
    assert {cell.share for cell in cells if cell.batch == 1} == set(grid.SHARES)


@pytest.mark.parametrize("policy", ["full", "snapkv", "streaming_llm", "h2o", "full+kivi4", "rocketkv", "pyramidkv"])
def test_the_context_is_what_slots_hold(model, policy):
    new, cell = 12, Decode(2, 160, 0.25)
    spec = cell.spec(PolicySpec.model_validate(policy))
    engine = Engine(model, EngineConfig(), PrefixCacheConfig(enabled=False), clock=lambda: 0.0)
    prompt = synthetic.random_prompt(model, spec, synthetic.random_keys_and_values(model, cell.prompt, 0))
    slots = synthetic.begin_decoding(engine, spec, prompt, cell.batch, new).slots
    for step in range(1, new - 1):
        engine.step()
        held = sum(
            len(slab.layers) * min(int(slab.state.count[row]), int(slab.state.limit[row]))
            for slot in slots
            for slab, rows in slot.places
            for row in rows
        )
        rows = model.kv_shape.layers * model.kv_shape.kv_heads
        assert cell.context(spec, [step], new) == pytest.approx(held / rows, rel=0.01)


def test_what_does_not_fit_is_left_out(model):
    cell, spec = Decode(8, 400, 0.5), PolicySpec()
    assert grid.decode_fits(cell, spec, model.kv_shape, 1 << 30, 16)
    assert not grid.decode_fits(cell, spec, model.kv_shape, 1 << 16, 16)
    assert grid.chunk_fits(Chunk(64, 400), spec, model.kv_shape, 1 << 30)
    assert not grid.chunk_fits(Chunk(64, 400), spec, model.kv_shape, 1 << 16)
