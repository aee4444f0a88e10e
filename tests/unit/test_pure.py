"""The folders that `.importlinter` calls pure load without torch, transformers, Ray and FastAPI."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LOAD_ALL = """
import importlib, pkgutil, sys
from fnmatch import fnmatch
forbidden, pure, impure = (text.split() for text in sys.argv[1:])
sys.modules.update(dict.fromkeys(forbidden))  # importing one raises
for root in map(importlib.import_module, pure):
    for module in pkgutil.walk_packages(getattr(root, "__path__", []), root.__name__ + "."):
        if not any(fnmatch(module.name, pattern) for pattern in impure):
            importlib.import_module(module.name)
"""


def test_pure_folders_load_without_torch_ray_or_servers():
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    pure = contracts["importlinter:contract:pure"]
    impure = " ".join(re.findall(r"^(\S+) ->", pure["ignore_imports"], re.MULTILINE))
    ran = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, pure["forbidden_modules"], pure["source_modules"], impure],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def test_who_deploys_replicas_loads_neither_torch_nor_transformers():
    """Leave what takes longest to load to the replicas, which have processes of their own."""
    code = "import sys, warmkv.platform.application; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
