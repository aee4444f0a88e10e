"""Each client as a function: it runs the program, checks what came out, and says it in a few words."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.client_commands.service import Service
from warmkv.config import ModelConfig
from warmkv.models.tiny import PATH, corpus, tasks
from warmkv.replicas.loading.tokenizer import load_tokenizer

QUIET = {  # nobody is told of these runs
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
SECONDS = 900  # a run may take on a busy machine
REQUESTS = 8
ENDPOINTS = ("chat", "completions", "messages", "responses")
WARM = 0.8  # of the prompt of an agent's second turn


class ClientError(Exception):
    """A client did not get what it came for."""


@dataclass(frozen=True)
class Run:
    """Where a client runs: its program, a folder of its own, and the service, with the requests it had before."""

    program: Path
    folder: Path
    service: Service
    before: int

    def __call__(self, *arguments: str, **environ: str) -> str:
        """Return what the program writes to its standard output. Raises ClientError where it ends with a fault."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        ran = subprocess.run(
            [self.program, *arguments],
            env={"PATH": os.environ["PATH"], "HOME": str(home), **QUIET, **environ},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if ran.returncode != 0:
            raise ClientError(f"ended with {ran.returncode}:\n{(ran.stdout + ran.stderr)[-3000:]}")
        return ran.stdout

    def answered(self) -> list[dict[str, Any]]:
        """Return the client's requests so far. Raises ClientError if one was not answered."""
        records = self.service.records()[self.before :]
        if not records or any(record["status"] != "ok" for record in records):
            raise ClientError(f"the service answered {[record['status'] for record in records]}")
        return records


def aiperf(run: Run) -> str:
    """Load of fixed lengths through each of the APIs, streamed where aiperf finds usage in a stream that was cut."""
    told = []
    for endpoint in ENDPOINTS:
        out = run.folder / endpoint
        streaming = () if endpoint == "responses" else ("--streaming",)  # it reads `response.completed` alone
        run(
            *("profile", "--model", run.service.model, "--url", run.service.url, "--tokenizer", str(PATH)),
            *("--endpoint-type", endpoint, *streaming, "--concurrency", "4", "--request-count", str(REQUESTS)),
            *("--prompt-input-tokens-mean", "200", "--prompt-input-tokens-stddev", "0"),
            *("--output-tokens-mean", "16", "--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true"),
            *("--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"),
            *("--artifact-dir", str(out)),
        )
        figures = json.loads((out / "profile_export_aiperf.json").read_text())
        answered, length = figures["request_count"]["avg"], figures["output_sequence_length"]["avg"]
        if (answered, length) != (REQUESTS, 16):
            raise ClientError(f"{endpoint}: {answered} of {REQUESTS} requests, {length} of 16 tokens")
        told.append(endpoint)
    run.answered()
    return f"{REQUESTS} of {REQUESTS} requests through each of {', '.join(told)}; 16 tokens each"


def guidellm(run: Run) -> str:
    """Load of fixed lengths through the chat API, after a look at /health."""
    out = run.folder / "report.json"
    run(
        *("run", "--backend", f"kind=openai_http,target={run.service.url},model={run.service.model}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", json.dumps({"kind": "hf_auto", "model": str(PATH)})),
        *("--data", "kind=synthetic_text,prompt_tokens=200,output_tokens=16"),
        *("--output", f"kind=json,path={out}", "--disable-console"),
        HF_HUB_OFFLINE="1",
    )
    totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    lengths = {record["output_tokens"] for record in run.answered()}
    if totals["successful"] != REQUESTS or lengths != {16}:
        raise ClientError(f"{totals}, {lengths} tokens")
    return f"{REQUESTS} of {REQUESTS} requests; 16 tokens each"


def lm_eval(run: Run) -> str:
    """A task of ours on held-out texts: the code as it is generated, and as the likeliest of four."""
    samples = [_sample(seed) for seed in range(20)]
    (run.folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(run.folder / "samples.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "target_delimiter": " ",
    }
    written = {
        "task": "codes_written",
        "output_type": "generate_until",
        "doc_to_target": "{{codes[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "ignore_punctuation": True}],
        "filter_list": [{"name": "strip", "filter": [{"function": "regex", "regex_pattern": "(\\d+)"}]}],
    }
    likely = {
        "task": "codes_likely",
        "output_type": "multiple_choice",
        "doc_to_choice": "codes",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    for task in (written, likely):  # JSON is YAML as well
        (run.folder / f"{task['task']}.yaml").write_text(json.dumps({**shared, **task}))
    settings = {
        "base_url": f"{run.service.url}/v1/completions",
        "model": run.service.model,
        "tokenizer": str(PATH),
        "tokenizer_backend": "huggingface",
        "num_concurrent": "2",
        "max_length": "4096",
    }
    run(
        *("run", "--model", "local-completions", "--model_args", ",".join(f"{k}={v}" for k, v in settings.items())),
        *("--include_path", str(run.folder), "--tasks", "codes_written,codes_likely"),
        *("--output_path", str(run.folder / "results")),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        OPENAI_API_KEY="any",
    )
    (report,) = (run.folder / "results").rglob("results_*.json")
    results = json.loads(report.read_text())["results"]
    shares = results["codes_written"]["exact_match,strip"], results["codes_likely"]["acc,none"]
    run.answered()
    if min(shares) < 0.9:
        raise ClientError(f"right: {shares}")
    return f"{shares[0]:.0%} of 20 codes written, {shares[1]:.0%} the likeliest of four"


def _sample(seed: int) -> dict[str, Any]:
    """Return a held-out text that ends where a code is to be named, the right code and three others."""
    tokenizer = load_tokenizer(ModelConfig())
    world = corpus.World("heldout", lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    rng = random.Random(seed)
    sample = tasks.single(world, rng, length=400, chat=False)
    others = [code for code in (tasks.code(rng) for _ in range(9)) if code != sample.answer]
    return {"prompt": sample.prompt(), "codes": [sample.answer, *others[:3]]}


def codex(run: Run) -> str:
    """Two turns of a thread, headless."""
    (run.folder / "codex").mkdir()
    (run.folder / "codex" / "config.toml").write_text(
        f"""\
model = "{run.service.model}"
model_provider = "warmkv"

[model_providers.warmkv]
name = "warmkv"
base_url = "{run.service.url}/v1"
env_key = "WARMKV_TENANT_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
    )
    environ = {"CODEX_HOME": str(run.folder / "codex"), "WARMKV_TENANT_KEY": "agent"}

    def turn(*words: str) -> None:
        run("exec", *words, "--skip-git-repo-check", "--json", **environ)

    return _two_turns(run, lambda: turn("Say hello."), lambda: turn("resume", "--last", "And again."))


def claude(run: Run) -> str:
    """Two turns of a conversation, headless."""
    environ = {
        "ANTHROPIC_BASE_URL": run.service.url,
        "ANTHROPIC_AUTH_TOKEN": "agent",
        "ANTHROPIC_MODEL": run.service.model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1100",
    }

    def turn(*words: str) -> None:
        answer = json.loads(run("-p", *words, "--output-format", "json", **environ))
        if answer["is_error"]:
            raise ClientError(str(answer["result"]))

    return _two_turns(run, lambda: turn("Say hello."), lambda: turn("And again.", "--continue"))


def _two_turns(run: Run, first: Callable[[], None], second: Callable[[], None]) -> str:
    first()
    turns = len(run.answered())
    second()
    record = run.answered()[turns]
    share = record["usage"]["read"] / record["input_tokens"]
    if share < WARM:
        raise ClientError(f"the second turn read {share:.0%} of {record['input_tokens']} tokens")
    return f"the second turn read {share:.1%} of its {record['input_tokens']:,} prompt tokens"


@dataclass(frozen=True)
class Client:
    """A client: how it is run, where it comes from, and whether its prompts need a long context."""

    run: Callable[[Run], str]
    package: str  # as its package manager takes it in a shell
    program: str
    long: bool = False

    @property
    def is_node(self) -> bool:
        return self.package.startswith("@")

    def path(self, folder: Path) -> Path:
        """Return where its program is if it was installed as `install` says."""
        return folder / self.run.__name__ / ("node_modules/.bin" if self.is_node else "bin") / self.program

    def install(self, folder: Path) -> str:
        """Return the command that installs it into a folder of its own."""
        own = folder / self.run.__name__
        if self.is_node:
            return f"npm install --prefix {own} {self.package}"
        return f"python3 -m venv {own} && {own}/bin/pip install {self.package}"


CLIENTS = {
    client.run.__name__: client
    for client in (
        Client(aiperf, "aiperf==0.13.0", "aiperf"),
        Client(guidellm, "guidellm==0.8.1", "guidellm"),
        Client(lm_eval, "'lm-eval[api]==0.4.13' transformers==5.23.0", "lm-eval"),
        Client(codex, "@openai/codex@0.169.0", "codex", long=True),
        Client(claude, "@anthropic-ai/claude-code@2.1.330", "claude", long=True),
    )
}
