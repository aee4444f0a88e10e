"""litellm: both APIs, Responses, plain completions; what it says a request costs is our bill."""

import litellm

said = [{"role": "user", "content": "Hello"}]
prices = {"input_cost_per_token": 3e-6, "output_cost_per_token": 15e-6}  # the defaults of `pricing`

answer = litellm.completion(
    model="openai/tiny", messages=said, max_tokens=8, n=2, user="a", metadata={"b": "c"}, seed=3
)
assert len(answer.choices) == 2
bill = answer.usage.warmkv["price"]["total"]
assert abs(litellm.completion_cost(answer, custom_cost_per_token=prices) - bill) < 1e-9

chunks = list(
    litellm.completion(
        model="openai/tiny", messages=said, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
)
assert chunks[-1].usage.completion_tokens > 0
assert litellm.completion(model="anthropic/claude-3-5-sonnet-20241022", messages=said, max_tokens=8).usage.total_tokens
assert list(litellm.completion(model="anthropic/claude-3-5-sonnet-20241022", messages=said, max_tokens=8, stream=True))
assert litellm.responses(model="openai/tiny", input="Hello", max_output_tokens=8).usage.output_tokens > 0
assert litellm.text_completion(model="text-completion-openai/tiny", prompt=["Hello", "Bye"], max_tokens=8).choices[1]
