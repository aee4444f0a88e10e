"""Requests that exceed the model's context, in the words by which clients of each API know that they should compact."""

from __future__ import annotations

from warmkv.platform.gateway.apis.errors import ApiError

CODE = "context_length_exceeded"


class PromptTooLongError(ApiError):
    """Refuse a prompt of so many `tokens`, of which `most` fit; `field` is where its API has the prompt.

    Where the prompt was not counted to its end (`exact` is False) it has more.
    """

    def __init__(self, tokens: int, most: int, field: str, *, exact: bool = True) -> None:
        more = "" if exact else " (at least: the rest was not counted)"
        super().__init__(
            "invalid_request_error",
            f"prompt is too long: {tokens} tokens > {most} maximum{more}",
            code=CODE,
            param=field,
            openai=f"This model's maximum context length is {most} tokens. However, your {field} resulted in {tokens} "
            f"tokens{more}. Please reduce the length of the {field}.",
        )
        self.tokens, self.exact = tokens, exact


def answer_too_long(prompt: int, new: int, most: int, field: str) -> ApiError:
    """Return the refusal of an answer of `new` tokens, for which a prompt leaves no room."""
    return ApiError(
        "invalid_request_error",
        f"input length and `max_tokens` exceed context limit: {prompt} + {new} > {most}, "
        "decrease input length or `max_tokens` and try again",
        code=CODE,
        param=field,
        openai=f"This model's maximum context length is {most} tokens. However, you requested {prompt + new} tokens "
        f"({prompt} in the {field}, {new} in the completion). Please reduce the length of the {field} or completion.",
    )
