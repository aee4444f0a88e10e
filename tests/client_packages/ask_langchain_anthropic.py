"""langchain-anthropic: whole, streamed, a marked prefix, tools and thinking."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool


@tool
def look_up(word: str) -> str:
    """Find a word."""
    return f"{word} is here"


NAME = "claude-sonnet-4-5"
chat = ChatAnthropic(model=NAME, max_tokens=8, max_retries=0)
assert chat.invoke("Hello").usage_metadata["output_tokens"] > 0
assert ChatAnthropic(model=NAME, max_retries=0).invoke("Hello").content is not None  # its own max_tokens
assert list(chat.stream("Hello"))
marked = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
assert chat.invoke([HumanMessage(marked)]).usage_metadata["input_tokens"] > 0
call = {"id": "toolu_1", "name": "look_up", "args": {"word": "a"}}
turns = [HumanMessage("Find a."), AIMessage("", tool_calls=[call]), ToolMessage("a is here", tool_call_id="toolu_1")]
assert chat.bind_tools([look_up]).invoke(turns).usage_metadata["input_tokens"] > 0
thinking = {"type": "enabled", "budget_tokens": 1024}
assert ChatAnthropic(model=NAME, max_tokens=2048, max_retries=0, thinking=thinking).invoke("Hello") is not None
assert chat.get_num_tokens_from_messages([HumanMessage("Hello")]) > 0
