"""The Anthropic and OpenAI APIs: requests, answers and errors, as clients see them."""
