"""LangChain's agents: a tool that is called, through the Messages API, chat and Responses."""

from collections.abc import Callable
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_anthropic import ChatAnthropic
from langchain_anthropic.middleware import AnthropicPromptCachingMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

ran = list[str]()  # words of which the tool was asked


@tool
def look_up(word: Literal["a", "b"]) -> str:
    """Find a word."""
    ran.append(word)
    return f"{word} is here"


@wrap_model_call
def asking(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """Have the model call a tool for what a user says; what it says by the result is free.

    One call, held to its schema: the small model would write calls, or arguments, until its tokens end.
    """
    settings = {**request.model_settings, "strict": True}  # in each turn, since tools stand in the prompt
    if isinstance(request.messages[-1], HumanMessage):
        request = request.override(tool_choice="any")
        settings["parallel_tool_calls"] = False
    return handler(request.override(model_settings=settings))


# Of 400 tokens most are for whitespace that a schema allows. For models named gpt-5 no temperature would be sent.
limits = {"max_tokens": 400, "temperature": 0, "max_retries": 0}
marking = AnthropicPromptCachingMiddleware(min_messages_to_cache=0)  # chat and Responses find prefixes without marks
for name, model, middleware in (
    ("Messages", ChatAnthropic(model="claude-sonnet-4-5", **limits), [marking, asking]),
    ("chat", ChatOpenAI(model="gpt-4.1", **limits), [asking]),
    ("Responses", ChatOpenAI(model="gpt-4.1", use_responses_api=True, **limits), [asking]),
):
    ran.clear()
    system = f"{name}: find words for who asks for them. " * 20  # a prefix of its own
    agent = create_agent(model, [look_up], system_prompt=system, middleware=middleware)
    asked, called, found, answer = agent.invoke({"messages": [HumanMessage("Find a.")]})["messages"][:4]
    assert isinstance(called, AIMessage)
    assert isinstance(found, ToolMessage)
    assert isinstance(answer, AIMessage)
    (call,) = called.tool_calls
    assert ran[0] == call["args"]["word"]
    assert (found.tool_call_id, found.content) == (call["id"], f"{ran[0]} is here")
    first, second = called.usage_metadata, answer.usage_metadata
    assert first["input_token_details"]["cache_read"] < first["input_tokens"] / 2
    assert second["input_token_details"]["cache_read"] > second["input_tokens"] / 2
