"""Extras of the package: which of them brings a module that is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from warmkv.faults import UserError

EXTRAS = {
    "serve": ("fastapi", "jinja2", "ray", "safetensors", "tokenizers", "torch", "transformers", "uvicorn"),
    "quantized": ("accelerate", "compressed_tensors"),
    "flash": ("flash_attn",),
    "record": ("aiohttp", "brotli", "zstandard"),
    "route": ("zmq", "msgpack"),
    "vllm": ("vllm", "msgpack", "zmq"),
    "demo": ("anthropic", "openai"),
    "dashboards": ("grafana_api", "grafana_foundation_sdk"),
    "eval": ("matplotlib", "pyarrow"),
    "tune": ("optuna",),
}
"""Modules by the extra of pyproject.toml that installs them."""


def require(what: str, *modules: str) -> None:
    """Refuse to begin something without the modules that it will need. Raises UserError."""
    if missing := [module for module in modules if find_spec(module) is None]:
        extra = next(name for name, brings in EXTRAS.items() if missing[0] in brings)
        raise UserError(f"{what} needs {' and '.join(missing)}; install with: pip install 'warmkv[{extra}]'")


def advice(module: str | None) -> str | None:
    """Return how to install what brings a missing module; None for a module of no extra."""
    root = (module or "").partition(".")[0]
    extra = next((name for name, modules in EXTRAS.items() if root in modules), None)
    return f"{root} is not installed; this needs: pip install 'warmkv[{extra}]'" if extra else None
