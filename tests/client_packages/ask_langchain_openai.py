"""langchain-openai: chat whole, streamed and in a batch, several answers, tools, plain completions, Responses."""

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI


@tool
def look_up(word: str) -> str:
    """Find a word."""
    return f"{word} is here"


chat = ChatOpenAI(model="gpt-5", max_tokens=8, max_retries=0)
assert chat.invoke("Hello").usage_metadata["output_tokens"] > 0
assert list(chat.stream("Hello"))
assert len(chat.batch(["Hello", "Bye"])) == 2
assert len(chat.generate([[HumanMessage("Hello")]], n=2).generations[0]) == 2
assert chat.bind(logprobs=True, top_logprobs=2).invoke("Hello").response_metadata["logprobs"]["content"]
call = {"id": "call_1", "name": "look_up", "args": {"word": "a"}}
turns = [HumanMessage("Find a."), AIMessage("", tool_calls=[call]), ToolMessage("a is here", tool_call_id="call_1")]
assert chat.bind_tools([look_up]).invoke(turns).usage_metadata["input_tokens"] > 0

texts = OpenAI(model="tiny", max_tokens=8, max_retries=0)
assert len(texts.generate(["import a", "import b"]).generations) == 2

responses = ChatOpenAI(model="tiny", max_tokens=8, max_retries=0, use_responses_api=True, use_previous_response_id=True)
first = responses.invoke("Hello")
assert responses.invoke([HumanMessage("Hello"), first, HumanMessage("And then?")]).usage_metadata["input_tokens"] > 0
assert list(responses.bind_tools([look_up]).stream(turns))
