"""openai-agents: the Responses API (its default) and chat; a tool, a session, streams, and a chain of responses."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    SQLiteSession,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
)
from openai import AsyncOpenAI

found = list[str]()  # words of which the tool was asked


@function_tool
def look_up(word: Literal["a", "b"]) -> str:
    """Find a word."""
    found.append(word)
    return f"{word} is here"


ending = ModelSettings(max_tokens=1000, temperature=0)  # it raises for an answer that is cut
agent = Agent(name="finder", instructions="Be brief.", model="gpt-5", model_settings=ending, tools=[look_up])
chats = OpenAIChatCompletionsModel("tiny", AsyncOpenAI(max_retries=0))


async def run() -> None:
    first = await Runner.run(agent, "Hello")
    assert first.raw_responses[0].usage.output_tokens > 0
    assert (await Runner.run(agent, "And then?", previous_response_id=first.last_response_id)).last_response_id
    session = SQLiteSession("a")
    for text in ("Hello", "And then?"):
        await Runner.run(agent, text, session=session)
    assert len(await session.get_items()) >= 4
    streamed = Runner.run_streamed(agent, "Hello")
    assert [event async for event in streamed.stream_events()]
    assert streamed.final_output is not None
    assert (await Runner.run(agent.clone(model=chats), "Hello")).final_output is not None
    for name, model in (("Responses", "gpt-5"), ("chat", chats)):
        await finds(name, model)


async def finds(name: str, model: str | OpenAIChatCompletionsModel) -> None:
    """Have the model call the tool in the first turn; in the second, with the result, it is free.

    One call: the small model would write calls until its tokens end.
    """
    found.clear()
    asking = ModelSettings(max_tokens=1000, temperature=0, tool_choice="required", parallel_tool_calls=False)
    instructions = f"{name}: find words for who asks for them. " * 20  # a prefix of its own
    ran = await Runner.run(agent.clone(model=model, model_settings=asking, instructions=instructions), "Find a.")
    called = next(item.raw_item for item in ran.new_items if isinstance(item, ToolCallItem))
    told = next(item for item in ran.new_items if isinstance(item, ToolCallOutputItem))
    assert (told.raw_item["call_id"], told.output) == (called.call_id, f"{found[0]} is here")
    first, second = (response.usage for response in ran.raw_responses[:2])
    assert first.input_tokens_details.cached_tokens < first.input_tokens / 2
    assert second.input_tokens_details.cached_tokens > second.input_tokens / 2
    assert ran.final_output is not None


asyncio.run(run())
