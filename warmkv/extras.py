"""Extras of the package: which of them brings a module that is not installed."""

from __future__ import annotations

EXTRAS = {
    "serve": ("fastapi", "jinja2", "ray", "safetensors", "tokenizers", "torch", "transformers", "uvicorn"),
    "demo": ("anthropic", "openai"),
    "dashboards": ("grafana_api", "grafana_foundation_sdk"),
    "eval": ("matplotlib", "pyarrow"),
    "tune": ("optuna",),
}
"""Modules by the extra of pyproject.toml that installs them."""


def advice(module: str | None) -> str | None:
    """Return how to install what brings a missing module; None for a module of no extra."""
    root = (module or "").partition(".")[0]
    extra = next((name for name, modules in EXTRAS.items() if root in modules), None)
    return f"{root} is not installed; this needs: pip install 'warmkv[{extra}]'" if extra else None
