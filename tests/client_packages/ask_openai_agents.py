"""openai-agents: the Responses API (its default) and chat; a tool, a session, streams, and a chain of responses."""

import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool
from openai import AsyncOpenAI


@function_tool(strict_mode=False)
def look_up(word: str) -> str:
    """Find a word."""
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


asyncio.run(run())
