"""warmkv's own engine: any compression policy, tiers, transfers between replicas."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from warmkv.config import Config
from warmkv.replicas import device_memory
from warmkv.replicas.block_store.packs import check_roots
from warmkv.replicas.block_store.presence import Publish
from warmkv.replicas.constraints.compiler import Compiler
from warmkv.replicas.engine import batch_invariant
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engines.interface import Parts, Place
from warmkv.replicas.loading.load import load_model, token_classes
from warmkv.replicas.loading.self_check import check_engine
from warmkv.replicas.transfer import Transfers

log = logging.getLogger(__name__)


def build(config: Config, tokenizer: Any, place: Place, publish: Publish, say: Callable[[str], None]) -> Parts:
    """Load the model, plan its memory and try the engine; raise where one of them fails. `say` is told what is next."""
    if place.roots is not None and config.prefix_cache.enabled:
        for path in config.prefix_cache.packs:  # before the model is loaded
            check_roots(path, place.roots)
    device_memory.check_before_loading(config, place.share)
    model = load_model(config.model)
    memory = device_memory.plan_replica(model, config.engine, config.prefix_cache, place.share)
    log.info(memory.summary)
    memory.check()
    engine = Engine(
        model,
        config.engine,
        config.prefix_cache,
        clock=time.monotonic,
        name=place.replica,
        classes=token_classes(tokenizer),
        memory=memory,
        publish=publish,
    )
    engine.warm_up(say, config.compression.policy)
    check_engine(engine, say)
    batch_invariant.check(engine, say)
    return Parts(
        engine,
        memory.to_json(),
        Compiler(tokenizer, model.vocabulary, model.eos_ids),
        lambda terms, ask, recorder: Transfers(engine, place.replica, terms, ask, recorder, clock=time.monotonic),
    )
