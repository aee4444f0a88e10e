"""`usage.warmkv.cache`: every answer says up to where its prompt was read, and why not further."""

from __future__ import annotations

import copy
from typing import Any

from tests.unit.platform.asgi import Gateway
from tests.unit.platform.gateway.apis.claude_code import MARK, text, tool

WORDS = "a word or two to say " * 16  # some 100 tokens


def ask(server: Any, key: str, **body: Any) -> Any:
    """Return the answer's usage."""
    whole = {"model": server.config.model.name, "max_tokens": 1, **body}
    return server.anthropic(key).messages.create(**whole).usage


def conversation(turns: int = 1) -> dict[str, Any]:
    """Two tools, a system prompt of two blocks, and so many turns; marks on the system prompt and the last message."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": [text(f"{WORDS} question {turn}")]})
        messages.append({"role": "assistant", "content": [text(f"answer {turn}")]})
    messages[-2]["content"][0] |= MARK
    return {
        "tools": [tool("Read"), tool("Edit")],
        "system": [text("Be brief."), text(WORDS, **MARK)],
        "messages": messages[:-1],
    }


def test_what_is_found_and_what_is_new(server):
    first = ask(server, "new", **conversation())
    written = first.cache_creation_input_tokens
    assert first.warmkv["cache"] == {
        "found": None,
        "missed": "tools.0",
        "reason": "never_written",
        "missed_tokens": {"never_written": written},
    }
    second = ask(server, "new", **conversation(2))
    assert second.cache_read_input_tokens == written
    assert second.warmkv["cache"] == {
        "found": "messages.0.content.0",
        "missed": "messages.1.content.0",
        "reason": "never_written",
        "missed_tokens": {"never_written": second.cache_creation_input_tokens},
    }
    third = ask(server, "new", **conversation(2))
    everything = {"found": "messages.2.content.0", "missed": None, "reason": None, "missed_tokens": {}}
    assert third.warmkv["cache"] == everything


def test_what_was_changed_is_named(server):
    base = conversation(3)
    ask(server, "changed", **base)

    def changed(part: str, number: int, **more: Any) -> dict[str, Any]:
        found = copy.deepcopy(base)
        found[part][number] |= more
        return found

    for body, place in (
        (changed("tools", 1, description="another"), "tools.1"),
        (changed("system", 0, text="Be long."), "system.0"),
        (changed("messages", 2, content=[text("another")]), "messages.2.content.0"),
    ):
        cache = ask(server, "changed", **body).warmkv["cache"]
        assert (cache["reason"], cache["missed"]) == ("changed", place)


def test_a_choice_a_short_mark_and_none(server):
    base = conversation()
    ask(server, "marks", **base)
    choices = [{"type": "none"}, {"type": "any"}, *({"type": "tool", "name": name} for name in ("Read", "Edit"))]
    for choice in choices:  # each is another one than those before
        cache = ask(server, "marks", **base, tool_choice=choice).warmkv["cache"]
        assert (cache["found"], cache["reason"], cache["missed"]) == ("system.1", "template", "messages.0.content.0")
    for choice in choices:
        assert ask(server, "marks", **base, tool_choice=choice).warmkv["cache"]["missed"] is None
    short = ask(server, "marks", messages=[{"role": "user", "content": [text("short", **MARK)]}]).warmkv["cache"]
    assert (short["reason"], short["missed"]) == ("below_minimum", "messages.0.content.0")
    none = ask(server, "marks", messages=[{"role": "user", "content": WORDS}])
    assert none.warmkv["cache"]["missed_tokens"] == {"unmarked": none.input_tokens}


def test_what_was_too_far_back(server):
    blocks = [text(f"block {number}") for number in range(25)]
    ask(server, "far", messages=[{"role": "user", "content": [text(WORDS, **MARK)]}])
    far = ask(server, "far", messages=[{"role": "user", "content": [text(WORDS), *blocks, text("end", **MARK)]}])
    assert far.cache_read_input_tokens == 0
    assert list(far.warmkv["cache"]["missed_tokens"]) == ["lookback", "never_written"]


def test_what_has_expired_by_the_gateway_s_clock_and_what_had_to_go(tmp_path):
    gateway = Gateway(tmp_path)
    gateway.written = 4096
    said = [{"role": "user", "content": [text(WORDS, **MARK)]}]
    reasons = []
    for gateway.now in (0.0, 10.0, 400.0):
        body = gateway.messages("a", messages=said).body
        reasons.append(body["usage"]["warmkv"]["cache"]["reason"])
    assert reasons == ["never_written", "evicted", "expired"]


def test_tokens_are_counted_by_reason(server):
    seen = len(server.metrics.seen)
    usage = ask(server, "counted", **conversation())
    counted = {
        labels["reason"]: value for name, value, labels in server.metrics.seen[seen:] if name == "warmkv_missed_tokens"
    }
    assert counted == {"never_written": usage.cache_creation_input_tokens}


def test_a_prompt_without_marks_of_the_other_api(server):
    def chat(question: str) -> Any:
        said = [{"role": "system", "content": WORDS}, {"role": "user", "content": question}]
        answer = server.openai("chat").chat.completions.create(
            model=server.config.model.name, max_tokens=1, messages=said
        )
        return answer.usage.warmkv["cache"]

    assert (chat("one")["reason"], chat("two")["missed"]) == ("never_written", None)


def test_forgotten_prefixes_were_never_written(server):
    ask(server, "forgotten", **conversation())
    server.anthropic("forgotten").delete("/v1/warmkv/prefixes", cast_to=object)
    body = conversation()
    body["messages"][0]["content"][0]["text"] += "!"
    assert ask(server, "forgotten", **body).warmkv["cache"]["reason"] == "never_written"


def test_prefixes_are_forgotten_in_all_gateways(tmp_path):
    one, other = Gateway(tmp_path), Gateway(tmp_path)
    one.others, said = [other], [{"role": "user", "content": [text(WORDS, **MARK)]}]

    def reason(gateway: Gateway) -> Any:
        gateway.written = 4096
        return gateway.messages("a", messages=said).body["usage"]["warmkv"]["cache"]["reason"]

    assert [reason(gateway) for gateway in (one, other, other)] == ["never_written", "never_written", "evicted"]
    assert one.call("DELETE", "/v1/warmkv/prefixes", "a").status == 200
    assert [reason(gateway) for gateway in (one, other)] == ["never_written", "never_written"]
