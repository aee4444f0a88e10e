"""vLLM's engine as a race needs it: runs in vLLM's own environment, imports nothing of warmkv, obeys lines of JSON.

Every line on standard input is a job `{"prompts": [[ids]], "new_tokens": [n]}`, computed together and greedily; every
line on standard output says when each step ended and for how many sequences it drew a token, and each prompt's tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load the model named by the settings in the first argument, then answer jobs until the input ends."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps are driven from here
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes to the log
    from vllm import LLM, SamplingParams

    engine = LLM(**json.loads(sys.argv[1])).llm_engine
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(_answer(engine, SamplingParams, json.loads(line), number)), file=answers, flush=True)


def _answer(engine: Any, sampling: Any, job: dict[str, Any], number: int) -> dict[str, Any]:
    began = time.perf_counter()
    for at, (prompt, new) in enumerate(zip(job["prompts"], job["new_tokens"], strict=True)):
        greedy = sampling(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        engine.add_request(f"{number}-{at}", {"prompt_token_ids": prompt}, greedy)
    tokens: list[list[int]] = [[] for _ in job["prompts"]]
    cached = [0] * len(tokens)
    steps: list[tuple[float, int]] = []  # seconds since the beginning; sequences that a token was drawn for
    while engine.has_unfinished_requests():
        outputs = engine.step()
        steps.append((time.perf_counter() - began, len(outputs)))
        for output in outputs:
            at = int(output.request_id.split("-")[1])
            tokens[at] = list(output.outputs[0].token_ids)
            cached[at] = output.num_cached_tokens or 0
    return {"steps": steps, "tokens": tokens, "cached": cached}


if __name__ == "__main__":
    main()
