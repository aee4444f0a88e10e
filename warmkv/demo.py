"""`warmkv demo`: a long document, several questions, two SDKs, three policies; the table tells whether it works.

Every row is a tenant of its own, so its first question is cold whatever ran before. The facts asked for are hidden at
known depths, so it is known in advance which of them StreamingLLM's window still holds.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from warmkv.config import Config
from warmkv.models.tiny import corpus, tasks
from warmkv.platform.local import check_model, running
from warmkv.policies import budgets, pricing
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.index import PUBLISH_SECONDS
from warmkv.prefixes.usage import Usage
from warmkv.terminal import plain_table, show_table, steps

POLICIES = ("full", "snapkv@0.2", "streaming_llm@0.4")
DOCUMENT_TOKENS = 1800
QUESTIONS = 3
ANSWER_TOKENS = 8
CALL_TOKENS = 64
TOOL: dict[str, Any] = {
    "name": "look_up",
    "description": "Look up the {noun} of a name.",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str
    depth: float  # where the fact stands in the document, 0 the beginning, 1 the end


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the service as a client saw it."""

    text: str
    ttft: float  # seconds until the first text, at the client
    read: int  # prompt tokens read from the cache, as billed
    usage: Usage
    details: dict[str, Any]  # the `warmkv` part of the usage


@dataclass(slots=True)
class DemoRow:
    """All questions through one SDK under one policy."""

    api: str
    policy: str
    replies: list[Reply] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    expected: list[bool] = field(default_factory=list)  # whether the policy can still know the fact

    @property
    def passed(self) -> bool:
        """Return True if warm requests read the cache and every answer is right whose fact the policy kept."""
        warm = all(reply.read > 0 for reply in self.replies[1:]) and self.replies[0].read == 0
        return warm and all(right for right, known in zip(self.right, self.expected, strict=True) if known)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The second turn of a conversation: where it landed, and what it costs elsewhere."""

    first_replica: str
    second_replica: str
    warm: Reply
    elsewhere: Reply

    @property
    def passed(self) -> bool:
        landed = self.first_replica == self.second_replica
        return landed and self.warm.details["cached_tokens"] > 0 and self.elsewhere.details["cached_tokens"] == 0


@dataclass(frozen=True, slots=True)
class ToolRound:
    """Record a tool that the model called by itself, and the answers by its result."""

    called: str  # empty if it was not
    key: str  # what it was called with
    right: list[bool]
    read: int  # prompt tokens of the last question, from the cache
    asked: int  # for how many words until then

    @property
    def passed(self) -> bool:
        return self.called == TOOL["name"] and bool(self.right) and all(self.right) and self.read > 0


@dataclass(frozen=True, slots=True)
class DemoResult:
    rows: list[DemoRow]
    conversation: Conversation
    tools: ToolRound

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows) and self.conversation.passed and self.tools.passed

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "passed": row.passed} for row in self.rows]
        return {
            "rows": rows,
            "conversation": {**asdict(self.conversation), "passed": self.conversation.passed},
            "tools": {**asdict(self.tools), "passed": self.tools.passed},
            "passed": self.passed,
        }


def run(config: Config, seed: int) -> DemoResult:
    """Start the service with two replicas, ask everything, stop it. Raises OSError where the port is taken."""
    cluster = config.cluster.model_copy(update={"replicas": max(2, config.cluster.replicas)})
    routing = config.routing.model_copy(update={"transfer": False})  # to show what it is to be on the wrong replica
    config = config.model_copy(update={"cluster": cluster, "routing": routing})
    with steps(len(POLICIES) * 2 * QUESTIONS + 5) as progress:
        progress("starting Ray and two replicas", 1)
        check_model(config.model)
        document, questions = make_document(config, seed)
        with running(config) as service:

            def told(text: str) -> None:
                progress(text, 1)

            rows = [
                ask_all(api, policy, service.url, config, document, questions, told)
                for api in ("anthropic", "openai")
                for policy in POLICIES
            ]
            conversation = converse(service.url, service.operator_key, config, document, questions)
            progress("a tool", 3)
            tools = call_tool(service.url, config, document, questions)
            progress("", 1)
    return DemoResult(rows, conversation, tools)


def make_document(config: Config, seed: int) -> tuple[str, list[Question]]:
    """Return a text of held-out source code with codes hidden in it, and questions in the order of their facts."""
    from warmkv.replicas.loading.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    world = corpus.World("heldout", count=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    rng = random.Random(seed)
    while True:  # until the facts are spread: one near each end of the document
        sample = tasks.multi(world, rng, length=DOCUMENT_TOKENS, chat=True, keys=QUESTIONS, turns=QUESTIONS)
        found = [
            Question(turn.question, turn.answer, sample.document.index(turn.answer) / len(sample.document))
            for turn in sample.turns
        ]
        found.sort(key=lambda question: question.depth)
        if found[0].depth < 0.3 and found[-1].depth > 0.8:
            return sample.document, found


def ask_all(
    api: str,
    policy: str,
    url: str,
    config: Config,
    document: str,
    questions: Sequence[Question],
    told: Callable[[str], None],
) -> DemoRow:
    row = DemoRow(api, policy)
    ask = {"anthropic": ask_anthropic, "openai": ask_openai}[api]
    for question in questions:
        told(f"{api}, {policy}")
        reply = ask(url, config.model.name, f"demo-{api}-{policy}", document, question.text, {"policy": policy})
        row.replies.append(reply)
        row.right.append(reply.text.strip() == question.answer)
        row.expected.append(still_known(policy, reply.usage.prompt, question.depth))
    return row


def still_known(policy: str, prompt_tokens: int, depth: float) -> bool:
    """Return True if a fact at this depth survives; only windows give up tokens whatever they say."""
    spec = PolicySpec.model_validate(policy)
    if not spec.method.recent_only:
        return True
    recent = budgets.kept_tokens(spec, prompt_tokens) - (spec.sinks or 0)
    return depth * prompt_tokens > prompt_tokens - recent + 32  # clear of the window's edge


def ask_anthropic(url: str, model: str, key: str, document: str, question: str, options: dict[str, Any]) -> Reply:
    """Ask through the `anthropic` SDK: the document is a content block with a cache breakpoint."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    content: Any = [
        {"type": "text", "text": document, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": question},
    ]
    begun = time.perf_counter()
    events = client.messages.create(
        model=model,
        max_tokens=ANSWER_TOKENS,
        messages=[{"role": "user", "content": content}],
        stream=True,
        extra_body={"temperature": 0, "warmkv": options},
    )
    text, first, usage = "", 0.0, None
    for event in events:
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            first = first or time.perf_counter() - begun
            text += event.delta.text
        elif event.type == "message_delta":
            usage = event.usage
    assert usage is not None
    fields = usage.model_dump()
    written = {"5m": fields["cache_creation_input_tokens"]}
    read = fields["cache_read_input_tokens"]
    billed = Usage(input=fields["input_tokens"], read=read, written=written, output=fields["output_tokens"])
    return Reply(text, first, read, billed, fields["warmkv"])


def ask_openai(url: str, model: str, key: str, document: str, question: str, options: dict[str, Any]) -> Reply:
    """Ask through the `openai` SDK: whole blocks are reused without marks."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    begun = time.perf_counter()
    chunks = client.chat.completions.create(
        model=model,
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": document}, {"type": "text", "text": question}]}
        ],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"warmkv": options},
    )
    text, first, usage = "", 0.0, None
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - begun
            text += chunk.choices[0].delta.content
        usage = chunk.usage or usage
    assert usage is not None
    fields = usage.model_dump()
    read = fields["prompt_tokens_details"]["cached_tokens"]
    billed = Usage(input=fields["prompt_tokens"] - read, read=read, output=fields["completion_tokens"])
    return Reply(text, first, read, billed, fields["warmkv"])


def converse(url: str, operator_key: str, config: Config, document: str, questions: Sequence[Question]) -> Conversation:
    """Send two turns about one document; the second once where the router sends it and once on another replica."""
    import anthropic
    import requests

    client = anthropic.Anthropic(base_url=url, api_key="demo-conversation", max_retries=0)
    history: list[Any] = [{"role": "user", "content": f"{document}\n{questions[0].text}"}]

    def turn(options: dict[str, Any]) -> Reply:
        begun = time.perf_counter()
        message = client.messages.create(
            model=config.model.name,
            max_tokens=ANSWER_TOKENS,
            messages=history,
            cache_control={"type": "ephemeral"},
            extra_body={"temperature": 0, "warmkv": options},
        )
        fields = message.usage.model_dump()
        text = "".join(block.text for block in message.content if block.type == "text")
        usage = Usage(fields["input_tokens"], fields["cache_read_input_tokens"], {}, fields["output_tokens"])
        return Reply(text, time.perf_counter() - begun, usage.read, usage, fields["warmkv"])

    def replicas() -> dict[str, Any]:
        answer = requests.get(f"{url}/v1/warmkv/replicas", headers={"x-api-key": operator_key}, timeout=10)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()["replicas"]
        return found

    before = {name: replica["blocks"] for name, replica in replicas().items()}
    first = turn({})
    history += [{"role": "assistant", "content": first.text}, {"role": "user", "content": questions[1].text}]
    home = first.details["replica"]
    while replicas()[home]["blocks"] == before[home]:  # a person would be reading the answer meanwhile
        time.sleep(PUBLISH_SECONDS)
    other = next(name for name in before if name != home)
    warm = turn({})
    elsewhere = turn({"replica": other})  # after it: from now on both replicas are warm
    return Conversation(home, warm.details["replica"], warm, elsewhere)


def call_tool(url: str, config: Config, document: str, questions: Sequence[Question]) -> ToolRound:
    """Have the model call a tool by itself; it spells one word in ten wrongly, so the next one is asked for then."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="demo-tools", max_retries=0)
    for first in range(len(questions)):
        found = _tool_round(client, config, document, [*questions[first:], *questions[:first]], first + 1)
        if found.passed:
            break
    return found


def _tool_round(client: Any, config: Config, document: str, questions: Sequence[Question], asked: int) -> ToolRound:
    """Ask for what only a tool knows, run the call that the model writes, and ask about its result in two turns.

    Nothing constrains the call: the small model has learned to write it. What is found for a word of the document is
    the document, for any other one nothing.
    """
    noun = next(noun for noun in tasks.NOUNS if f" {noun} " in questions[0].text)
    tools: Any = [{**TOOL, "description": TOOL["description"].format(noun=noun)}]
    history: list[Any] = [{"role": "user", "content": questions[0].text}]

    def say(tokens: int) -> Any:
        return client.messages.create(
            model=config.model.name,
            max_tokens=tokens,
            messages=history,
            tools=tools,
            extra_body={"temperature": 0},
        )

    answer = say(CALL_TOKENS)
    call = next((block for block in answer.content if block.type == "tool_use"), None)
    if call is None:
        return ToolRound("", "", [], 0, asked)
    key = str(call.input.get("key"))
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": document if key in re.findall(r"\w+", document) else "Nothing is known of it.",
        "cache_control": {"type": "ephemeral"},
    }
    history += [{"role": "assistant", "content": answer.content}]
    right, content = [], [result]
    for question in questions[:2]:
        history.append({"role": "user", "content": [*content, {"type": "text", "text": question.text}]})
        answer, content = say(ANSWER_TOKENS), []
        text = "".join(block.text for block in answer.content if block.type == "text")
        right.append(text.strip() == question.answer)
        history.append({"role": "assistant", "content": text})
    return ToolRound(call.name, key, right, answer.usage.cache_read_input_tokens or 0, asked)


def show(result: DemoResult, config: Config, console: Console) -> None:
    """Print the table and what follows from it in plain words."""
    heads = ("SDK", "policy", "right", "cold", "warm", "read", "KV", "price", "saved")
    table = plain_table(*heads, left=2, gap=2)
    table.caption = "cold, warm: TTFT in ms; KV: MiB resident; ‒ the policy evicted the fact"
    for row in result.rows:
        cold, *warm = row.replies
        paid = sum(pricing.price(reply.usage, config.prices).total for reply in row.replies)
        uncached = sum(
            pricing.price(Usage(input=reply.usage.prompt, output=reply.usage.output), config.prices).total
            for reply in row.replies
        )
        table.add_row(
            row.api,
            row.policy,
            Text(" ").join(_verdicts(row)),
            f"{cold.ttft * 1000:.0f}",
            f"{statistics.median(reply.ttft for reply in warm) * 1000:.0f}",
            str(sum(reply.read for reply in row.replies)),
            f"{max(reply.details['resident_bytes'] for reply in row.replies) / 2**20:.2f}",
            f"${paid:.4f}",
            f"{1 - paid / uncached:.0%}",
        )
    show_table(table, console)
    talk = result.conversation
    here, there = talk.warm.details, talk.elsewhere.details
    console.print(
        f"Second turn of a conversation: landed on {talk.second_replica}, the first on {talk.first_replica}; "
        f"{here['cached_tokens']} tokens reused, prefill {here['prefill_seconds'] * 1000:.0f} ms. "
        f"On the other replica: {there['cached_tokens']} reused, {there['prefill_seconds'] * 1000:.0f} ms."
    )
    tools = result.tools
    answers = "both answers right" if all(tools.right) else "wrong answers"
    call = f"Called the tool {tools.called} for {tools.key} (words asked for: {tools.asked})"
    read = f"{answers} by its result, {tools.read} tokens of it read from the cache."
    console.print(f"{call}: {read}" if tools.called else "Called no tool.")
    console.print("passed" if result.passed else "failed", style="green" if result.passed else "red")


def _verdicts(row: DemoRow) -> Iterator[Text]:
    for right, known in zip(row.right, row.expected, strict=True):
        yield Text("✓", "green") if right else Text("✗", "red") if known else Text("‒", "yellow")
