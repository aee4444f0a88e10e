"""instructor: a pydantic answer, by the schema that the answer is held to."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel


class Found(BaseModel):
    """Two words: with all whitespace that its schema allows, ten gaps of 33 characters, and each letter written as an
    escape of six, it is below 500 tokens.
    """

    place: Literal["here", "there"]
    sure: bool


client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=instructor.Mode.JSON_SCHEMA)
found = client.chat.completions.create(
    model="gpt-5",
    response_model=Found,
    max_retries=1,
    max_tokens=500,
    messages=[{"role": "user", "content": "Where is it?"}],
)
assert found.place in ("here", "there")
