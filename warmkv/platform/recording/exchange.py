"""From the bytes of a request and its answer to a line of the access log, in which nothing of them can be read."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from warmkv.platform import json_values
from warmkv.platform.recording.conversations import Conversations, conversation_of, earlier
from warmkv.platform.recording.state import State
from warmkv.prefixes import breakpoints, hashing, prompt_text
from warmkv.prefixes.breakpoints import CachePlan
from warmkv.prefixes.prompt_text import Part
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.reported_usage import usage_of
from warmkv.prefixes.usage import Usage
from warmkv.request_context import session_of_body, session_of_headers

APIS = {"messages": "messages", "chat/completions": "chat", "completions": "completions", "responses": "responses"}
NAMES = re.compile(r"[A-Za-z0-9_.:/@+-]{1,128}")  # of models, errors and reasons to stop: no room for a text
USAGE = re.compile(rb'"usage"\s*:\s*\{')
DATA = re.compile(rb"(?:\A|[\r\n])data:([^\r\n]*)")  # of events, one after the other: lines may be millions
LONGEST_BODY = 32 << 20  # bytes of a request or an answer that are kept to be written down, packed and unpacked
MOST_VALUES = 1 << 19  # of JSON, in one of them: as objects each takes 50 to 100 bytes
MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

Tokenize = Callable[[str], list[int]]


@dataclass(slots=True)
class Exchange:
    """A request that passed, and what came back. Times are seconds; `started` is Unix time."""

    path: str  # decoded, without its query
    started: float
    headers: Mapping[str, str]  # of the request, by names in lower case
    request: bytearray = field(default_factory=bytearray)
    answer: bytearray = field(default_factory=bytearray)
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    code: int = 0  # of HTTP; 0 where there was no answer
    outcome: Literal["ok", "error", "cancelled"] = "ok"
    first: float = 0.0  # from the start to the first byte of the answer's body
    last: float = 0.0
    replica: str = ""  # that answered, where there are several


def api_of(method: str, path: str) -> str | None:
    """Return the API of a request that generates; None for all others. `path` is decoded, as servers match it."""
    path = path.rstrip("/")
    return next((api for end, api in APIS.items() if method == "POST" and path.endswith(f"/{end}")), None)


class Analyst:
    """Makes records of exchanges, one after the other. With `tokenize` prompts are counted in a model's tokens."""

    def __init__(self, state: State, block_size: int, tokenize: Tokenize | None = None) -> None:
        self._state, self._block_size, self._tokenize = state, block_size, tokenize
        self._number, self._conversations = 0, Conversations()

    def record(self, exchange: Exchange) -> RequestRecord:
        """Return the record of an exchange.

        Raises ValueError where its request is no JSON object, or one of its bodies is larger, unpacked, than is kept.
        """
        self._number += 1
        data = _unpacked(exchange.request, exchange.headers.get("content-encoding", ""))
        body = json_values.loads(data, MOST_VALUES)
        if not isinstance(body, dict):
            raise ValueError("the request is no JSON object")
        api = api_of("POST", exchange.path) or ""
        answer = Answer.of(_unpacked(exchange.answer, exchange.answer_headers.get("content-encoding", "")))
        usage = answer.usage
        model = _name(body.get("model"))
        parts = prompt_text.parts_of(body)
        if api != "messages":
            parts = [part._replace(ttl=None) for part in parts]
        tenant, head = self._tenant(exchange.headers), _head(body, model) if api == "responses" else b""
        if not prompt_text.is_whole(body):
            name = f"{exchange.started} {self._number}"
            known = self._conversations.prefix(tenant, earlier(body), head)
            tokens, plan, scale = self._continued(known, usage.prompt if usage else 0, name)
        else:
            if usage is not None and self._tokenize is None and self._state.scale.learn(model, parts, usage.prompt):
                self._state.save()
            tokens, plan, scale = self._plan(parts, model, tenant)
        if api == "responses" and usage is not None:
            names = (answer.id, conversation_of(body))
            self._conversations.add(tenant, names, head, plan.hashes)
        outcome = "error" if exchange.outcome == "ok" and (exchange.code >= 400 or answer.error) else exchange.outcome
        ok = outcome == "ok"
        return RequestRecord(
            id=_name(exchange.answer_headers.get("request-id") or exchange.answer_headers.get("x-request-id"))
            or f"recorded-{exchange.started:.6f}-{self._number}",
            arrival=exchange.started,
            tenant=tenant,
            model=model,
            api=api,
            policy="full",
            block_size=self._block_size,
            input_tokens=tokens,
            output_tokens=usage.output if usage and usage.output else answer.events,
            hashes=plan.hashes,
            marks=plan.marks,
            reads=plan.reads,
            usage=usage or Usage(),
            replica=exchange.replica,
            cached_tokens=usage.read if usage else 0,
            ttft=exchange.first if ok else 0.0,
            e2e=exchange.last,
            max_tokens=next((n for key in MAX_TOKENS if type(n := body.get(key)) is int and n >= 0), 0),
            status=outcome,
            stop_reason=answer.stop_reason if ok else outcome,
            error=answer.error or (_fault(exchange.code) if outcome == "error" else ""),
            session=self._session(exchange.headers, body),
            bytes_per_token=scale,
        )

    def _continued(self, known: Sequence[bytes], tokens: int, name: str) -> tuple[int, CachePlan, float]:
        """Name blocks of a prompt that was not sent whole: those that are known, then some that no other has."""
        known = known[: tokens // self._block_size]
        root = hashing.chain_root(self._state.salt, "unknown", name)
        rest = hashing.chain(bytes(tokens - len(known) * self._block_size), self._block_size, root)
        return tokens, CachePlan((*known, *rest), (), ()), 0.0

    def _plan(self, parts: list[Part], model: str, tenant: str) -> tuple[int, CachePlan, float]:
        salt, size = hashing.tenant_salt(self._state.salt, tenant), self._block_size
        root = hashing.chain_root(salt, model, str(size))
        if self._tokenize is None:
            scale = self._state.scale.of(model)
            tokens, plan = prompt_text.plan(parts, root, size, scale)
            return tokens, plan, scale
        ids: list[int] = []
        ends = []
        for part in parts:
            ids += self._tokenize(part.text.decode("utf-8", "replace"))
            ends.append(len(ids))
        marks = breakpoints.breakpoints(ends, [part.ttl for part in parts], 1)
        plan = breakpoints.plan(ids, ends, marks, root, block_size=size, joined=prompt_text.joined(parts))
        return len(ids), plan, 0.0

    def _tenant(self, headers: Mapping[str, str]) -> str:
        key = headers.get("x-api-key") or headers.get("authorization") or headers.get("api-key") or ""
        return self._hash("tenant", key)

    def _session(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
        session = session_of_headers(headers) or session_of_body(body.get("prompt_cache_key"), body.get("metadata"))
        return self._hash("session", session) if session else ""

    def _hash(self, what: str, text: str) -> str:
        data = f"{what}\0{text}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=hashlib.sha256(self._state.salt).digest(), digest_size=8).hexdigest()


def _head(body: Mapping[str, Any], model: str) -> bytes:
    """Return a digest of what a prompt begins with, whatever conversation follows."""
    parts = prompt_text.parts_of({name: body.get(name) for name in ("tools", "instructions")})
    return hashlib.blake2b(b"\0".join([model.encode(), *(part.text for part in parts)]), digest_size=16).digest()


def _name(value: Any) -> str:
    """Return a name as it is, anything else as nothing: the log has no texts."""
    return value if isinstance(value, str) and NAMES.fullmatch(value) else ""


def _fault(code: int) -> str:
    """Name what an answer without an error of its own failed by: a status of HTTP, or that upstream cut it off."""
    return f"http_{code}" if code >= 400 else "cut_off"


@dataclass(slots=True)
class Answer:
    """Hold what an answer tells: its usage if it reports one, else how many events a stream had, and why it ended.

    `id` is that of the part with the usage: of an answer of the Responses API, the one that others go on from.
    """

    usage: Usage | None = None
    stop_reason: str = ""
    error: str = ""
    events: int = 0
    id: str = ""

    @classmethod
    def of(cls, body: bytes) -> Answer:
        """Read a JSON object or a stream of server-sent events; what is cut off or is neither tells nothing."""
        found = cls()
        if body.lstrip()[:1] == b"{":
            found._take([_parsed(body)])
        else:
            found._take(_events(body))
            found.events = body.count(b"\ndata:") if found.usage is None else 0
        return found

    def _take(self, documents: list[Mapping[str, Any]] | Iterator[Mapping[str, Any]]) -> None:
        counts: dict[str, Any] = {}
        for document in documents:
            inner = [document, *(document.get(name) for name in ("message", "response", "delta"))]
            choices = document.get("choices")
            inner += choices if isinstance(choices, list) else []
            for one in inner:
                if not isinstance(one, dict):
                    continue
                if isinstance(usage := one.get("usage"), dict):
                    self.id = _name(one.get("id")) or self.id
                    counts |= {key: value for key, value in usage.items() if value is not None}
                self.stop_reason = _name(one.get("stop_reason") or one.get("finish_reason")) or self.stop_reason
                error = one.get("error")
                if one.get("type") == "error" and error is None:  # of the Responses API
                    error = {"code": one.get("code")}
                if isinstance(error, dict):
                    self.error = _name(error.get("type") or error.get("code")) or "error"
        try:
            self.usage = usage_of(counts) if counts else None
        except ValueError:
            self.usage = None


def _events(body: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield those events of a stream that have a usage, an error or a reason to stop."""
    for event in DATA.finditer(body):
        line = event[1]
        if USAGE.search(line) or b'"error"' in line or b'_reason"' in line:
            yield _parsed(line)


def _parsed(text: bytes) -> Mapping[str, Any]:
    try:
        found = json_values.loads(text, MOST_VALUES)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _unpacked(data: bytes | bytearray, encoding: str) -> bytes:
    """Return a body without its content encoding, as far as it came; nothing of an unknown one. Raises ValueError."""
    unpacked = _inflated(bytes(data), encoding, LONGEST_BODY + 1)
    if len(unpacked) > LONGEST_BODY:
        raise ValueError(f"a body has more than {LONGEST_BODY} bytes")
    return unpacked


def _inflated(data: bytes, encoding: str, most: int) -> bytes:
    try:
        match encoding.strip().lower():
            case "" | "identity":
                return data
            case "gzip" | "x-gzip" | "deflate":
                raw = encoding.strip().lower() == "deflate" and data[:1] != b"\x78"
                return zlib.decompressobj(-15 if raw else 47).decompress(data, most)
            case "br":
                import brotli

                return bytes(brotli.Decompressor().process(data, output_buffer_limit=most))
            case "zstd":
                import zstandard

                return zstandard.ZstdDecompressor().stream_reader(data).read(most)
    except Exception:  # whatever a library makes of damaged data
        return b""
    return b""
