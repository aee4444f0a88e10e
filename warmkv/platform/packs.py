"""Building knowledge packs: the KV of documents or a system prompt, computed once, as replicas load it at start."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from warmkv.config import Config, ConfigError
from warmkv.platform.gateway.apis.prompt import render
from warmkv.platform.gateway.apis.token_cache import TokenCache
from warmkv.platform.gateway.apis.tokens import tokenize
from warmkv.platform.gateway.apis.turns import ContentBlock, Turn
from warmkv.platform.tenants import Tenant, chain_root, roots_of
from warmkv.platform.tenants_file import find_tenant, roots_in_force
from warmkv.policies.slot_sizes import workspace_bytes
from warmkv.policies.tiers import FILE_BYTES
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes import hashing
from warmkv.prefixes.record import Mark
from warmkv.prefixes.roots import Roots
from warmkv.replicas.block_store import BlockStore, Identity
from warmkv.replicas.block_store.disk import LOCK, Folder, lasting_header, lock_folder
from warmkv.replicas.block_store.packs import PackError, check_files, check_roots, pack_manifest
from warmkv.replicas.device_memory import plan_replica
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.loading.load import load_model
from warmkv.replicas.loading.tokenizer import load_max_context, load_tokenizer
from warmkv.replicas.protocol import EngineError, Failed, GenerateRequest, SamplingParams

QUESTION = ContentBlock("?")
"""Stands for what a client will ask: what comes before it is what the pack holds."""


@dataclass(frozen=True, slots=True)
class Source:
    """Hold a text that goes into a pack, and the name of its file."""

    name: str
    text: str

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a file. Raises PackError where it cannot be read, is not UTF-8, or is empty."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise PackError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise PackError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}") from None
        if not text.strip():
            raise PackError(f"{path} is empty")
        return cls(path.name, text)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Hold the tokens that conversations begin with, and the name of the file that they end with."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """What a pack holds, all tenants together."""

    prefixes: int
    tokens: int
    blocks: int
    bytes: int


def prefixes(tokenizer: Any, system: Source | None, documents: Sequence[Source]) -> list[Prefix]:
    """Return what conversations begin with: the system prompt, then one document each, if there are any.

    A document is the first content block of the first user message. Raises PackError if there is nothing to hold, and
    ApiError where the model's chat template refuses.
    """
    before = [Turn("system", (ContentBlock(system.text),))] if system else []
    contents: list[tuple[str, tuple[ContentBlock, ...]]] = [
        (source.name, (ContentBlock(source.text), QUESTION)) for source in documents
    ]
    if system and not documents:
        contents = [(system.name, (QUESTION,))]
    if not contents:
        raise PackError("a pack needs a system prompt or documents")
    found = []
    for name, blocks in contents:
        rendered = render(tokenizer, [*before, Turn("user", blocks)])
        prompt = tokenize(tokenizer, rendered, TokenCache(), b"", 1 << 30)  # hashed below, for every tenant
        found.append(Prefix(name, prompt.tokens[: prompt.ends[-2]]))
    return found


def _check_lengths(found: Sequence[Prefix], config: Config) -> None:
    """Raise PackError for a prefix that no breakpoint marks, or behind which no question fits."""
    most, least = config.engine.max_context or load_max_context(config.model, "warmkv"), config.prefix_cache.min_tokens
    for prefix in found:
        if len(prefix.tokens) < least:
            raise PackError(
                f"{prefix.name}: {len(prefix.tokens)} tokens with all before it, and breakpoints are ignored before "
                f"{least} (prefix_cache.min_tokens)"
            )
        if (tokens := len(prefix.tokens)) >= most:
            raise PackError(f"{prefix.name}: {tokens} tokens with all before it, and a prompt has at most {most}")


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that becomes `out` at the end, and is removed if that is not reached.

    What a build that was killed left there is removed first. Raises PackError where `out` cannot be made, or OSError.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PackError(f"{out} is not empty" if out.is_dir() else f"{out} is a file")
    if out.is_mount():
        raise PackError(f"{out} is a mount point; name a folder in it")
    beside = out.with_name(f".{out.name}.part")
    lock = lock_folder(beside)
    if lock is None:
        raise PackError(f"{out} is being built by another process")
    try:
        for left in beside.iterdir():
            if left.name != LOCK:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield beside
        (beside / LOCK).unlink()
        beside.replace(out)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def check_packs(paths: Sequence[Path], config: Config, secret: bytes) -> None:
    """Raise PackError for packs that are not whole, or that no tenant could read under these settings and this secret.

    Raises ConfigError where the tenants file cannot be read, or replicas load no packs.
    """
    if not config.prefix_cache.enabled:
        raise ConfigError("prefix_cache.enabled is false: replicas load no packs")
    roots = roots_in_force(config, secret)
    for path in paths:
        check_roots(path, roots)
        check_files(path, config.prefix_cache.block_size)


def build(
    config: Config,
    names: Sequence[str],
    secret: bytes,
    system: Source | None,
    documents: Sequence[Source],
    out: Path,
    progress: Callable[[str], None] = lambda line: None,
) -> Built:
    """Compute the prefixes for the tenants of these names and write them to the folder `out`, or leave nothing there.

    Raises PackError, ApiError (the template refuses), or OSError.
    """
    try:
        tenants = [find_tenant(name, config, secret) for name in dict.fromkeys(names)]
    except LookupError as error:
        raise PackError(error.args[0]) from None
    roots = roots_of(config, secret, None if config.gateway.is_open else [tenant.name for tenant in tenants])
    with _staged(out) as beside:
        found = prefixes(load_tokenizer(config.model), system, documents)
        _check_lengths(found, config)  # before the model is loaded
        return _build(config, tenants, roots, found, beside, out, progress)


def _build(
    config: Config,
    tenants: Sequence[Tenant],
    roots: Roots,
    found: Sequence[Prefix],
    path: Path,
    out: Path,
    progress: Callable[[str], None],
) -> Built:
    """Compute prefixes and write them to a folder at `path`, which errors call `out`."""
    model = load_model(config.model)
    lengths = [len(prefix.tokens) for prefix in found]
    longest, total = max(lengths), sum(lengths)
    room = total * len(tenants) * model.kv_shape.token_bytes
    needed = workspace_bytes(PolicySpec(), model.kv_shape, longest)
    cache = config.prefix_cache.model_copy(
        update={"enabled": True, "automatic": True, "memory_bytes": ByteSize(room), "storage": "model", "packs": ()}
        | {name: type(getattr(config.prefix_cache, name))() for name in ("host", "disk")}
    )
    planned = plan_replica(model, config.engine, cache).kv.bytes
    limits = config.engine.model_copy(update={"kv_bytes": ByteSize(max(needed, planned))})
    engine = Engine(model, limits, cache, clock=lambda: 0.0)  # nothing expires while it is built
    folder = Folder(path, Identity.of(model, cache.block_size), "model")
    written: dict[bytes, int] = {}
    try:
        for tenant in tenants:
            for number, prefix in enumerate(found, 1):
                progress(f"{tenant.name}: prefix {number} of {len(found)}, {len(prefix.tokens)} tokens")
                chain = _compute(engine, prefix, tenant, chain_root(tenant.salt, config), cache.default_ttl)
                written |= _export(engine.store, chain, folder)
        built = Built(len(found) * len(tenants), total * len(tenants), len(written), sum(written.values()))
        documents = [{"name": prefix.name, "tokens": len(prefix.tokens)} for prefix in found]
        folder.create(roots=roots.document(), documents=documents, **asdict(built))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        files = len(tenants) * sum(-(-length // cache.block_size) for length in lengths)
        needed = room + files * FILE_BYTES
        raise OSError(f"{out}: {error.strerror}; the pack needs at most {needed:,} bytes") from None
    return built


def contents(path: Path) -> dict[str, Any]:
    """Return what the manifest of a pack tells of it. Raises PackError."""
    manifest = pack_manifest(path)
    identity, roots = manifest["identity"], manifest["roots"]
    return {
        "path": str(path),
        "model": {"name": roots["model"], "kind": identity["model"]}
        | {name: identity[name] for name in ("weights", "dtype", "block_size")},
        "tenants": roots["tenants"],
        **{name: manifest[name] for name in ("documents", "prefixes", "tokens", "blocks", "bytes", "storage")},
    }


def _compute(engine: Engine, prefix: Prefix, tenant: Tenant, root: bytes, ttl: str) -> list[bytes]:
    """Prefill a prefix with a breakpoint at its end; the keys of its blocks and its tail."""
    tokens, size = prefix.tokens, engine.store.block_size
    hashes = hashing.block_hashes(tokens, size, root)
    key = hashing.prefix_key(tokens, len(tokens), size, hashes, root)
    request = GenerateRequest(
        id="pack",
        token_ids=tokens,
        hashes=tuple(hashes),
        sampling=SamplingParams(max_tokens=0),
        policy=PolicySpec(),
        marks=(Mark(len(tokens), ttl, key),),
        tenant=tenant.label,
    )
    told: list[object] = []
    try:
        engine.submit(request, told.append)
    except EngineError as error:
        raise PackError(f"{prefix.name}: {len(tokens)} tokens cannot be computed: {error}") from None
    while engine.step():
        pass
    if isinstance(told[-1], Failed):
        raise PackError(f"{prefix.name}: {len(tokens)} tokens could not be computed: {told[-1].message}")
    return hashes if key in hashes else [*hashes, key]


def _export(store: BlockStore, chain: Sequence[bytes], folder: Folder) -> dict[bytes, int]:
    """Write a chain from memory into a pack's folder, to live for good; the bytes by key. Raises PackError."""
    written = {}
    for block in store.tree.held(store.tree.find(chain), [0]):
        packed = store.find(block.key)
        if packed is not None:
            held = packed.map(lambda part: part.cpu())
            marked = block.mark_expires_at > store.clock()
            folder.write(held, lasting_header(block, packed.storage, marked=marked))
            written[block.key] = held.nbytes
    if len(written) < len(chain):
        raise PackError("memory does not suffice for the pack: raise prefix_cache.memory_bytes")
    return written
