"""Plug-ins of packages outside: found by their entry point, served like warmkv's own, refused where they are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from warmkv import policy_spec
from warmkv.knobs import SINKS, WINDOW
from warmkv.policies.compression.method import Method
from warmkv.registry import METHODS, PluginError, Registry

ROOT = Path(__file__).parents[2]

STRIDE = '''
"""Every n-th token of a prompt, and the last one: a method as a package outside writes it."""

from warmkv.knobs import Knob
from warmkv.policies.compression.method import Method, register


@register
class Stride(Method):
    name = "stride"
    knobs = (Knob("every", int, 3, "distance of the tokens that are kept", ge=1),)
    keeps = "every n-th token"

    def ends(self, budget):
        return 0, 1

    def score(self, prompt, layer, budget):
        import torch

        regular = torch.arange(prompt.tokens, device=prompt.keys.device) % self.spec.every == 0
        return regular.float().expand(prompt.kv_heads, -1)
'''

SERVE = """
import json

from tests.unit.replicas.conftest import Driver, make_request
from warmkv.config import ModelConfig, load
from warmkv.policies.compression import kept_positions
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import load_model

tiny = load_model(ModelConfig(device="cpu"))
driver, prompt = Driver(tiny), list(range(5, 45))
tokens = driver.run(make_request(prompt, new=4, policy="stride@10:every=4", ignore_eos=True))[0]
(kept, *_) = kept_positions(tiny, prompt, "stride@10:every=4")
print(json.dumps({
    "tokens": len(tokens),
    "kept_tokens": driver.started("request").kept_tokens,
    "positions": kept[0].tolist(),
    "label": load(flags=["compression.policy=stride@0.2:every=5"]).compression.policy.label,
    "schema": PolicySpec.model_json_schema()["properties"]["every"]["description"],
}))
"""


COARSE = '''
"""Keys and values as multiples of 1/8, 16 at a time: a storage as a package outside writes it."""

from warmkv.policies.compression.storage_format import StorageFormat, register


class Coarse(StorageFormat):
    name = alias = "coarse"
    group, residual, alias_residual = 16, 32, 64
    decode_rules = ("append", "ring")
    formula = "2 * d"

    def entry_bytes(self, head_dim, dtype_bytes):
        return 2.0 * head_dim

    def encode_keys(self, keys):
        import torch

        *lead, entries, head_dim = keys.shape
        codes = (keys.float() * 8).round().clamp(-127, 127) + 128
        return (codes.to(torch.uint8).view(*lead, entries // 16, 16, head_dim),)

    def decode_keys(self, parts, dtype):
        return ((parts[0].float() - 128) / 8).flatten(-3, -2).to(dtype)


register(Coarse())
'''

SERVE_STORAGE = """
import json

import torch

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.reference import Reference
from warmkv.config import ModelConfig, load
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import load_model

torch.manual_seed(0)
tiny = load_model(ModelConfig(device="cpu", dtype="float32"), packed=False)
driver, prompt, found = Driver(tiny), list(range(5, 65)), {}
for policy in ("full+coarse", "snapkv@56+ring+coarse:window=8"):
    spec = PolicySpec.model_validate(policy)
    got = driver.run(make_request(prompt, new=12, policy=policy, ignore_eos=True, name=policy))[-1]
    found[policy] = got == Reference(tiny.module).generate(prompt, 12, spec)[0]
try:
    PolicySpec.model_validate("h2o@80+coarse")
except ValueError as error:
    refused = str(error)
print(json.dumps({
    "as_the_slow_reference": found,
    "resident_bytes": driver.started("full+coarse").resident_bytes,
    "refused": "storage coarse only appends or is a ring while decoding, got argmin" in refused,
    "label": load(flags=["compression.policy=coarse"]).compression.policy.label,
    "schema": "coarse" in PolicySpec.model_json_schema()["properties"]["storage"]["enum"],
    "parts": sorted({str(part.dtype) for slab in driver.engine.pool.slabs for part in slab.memory.keys}),
    "shape": [tiny.kv_shape.layers, tiny.kv_shape.kv_heads, tiny.kv_shape.head_dim],
}))
"""


def wheel(folder: Path, name: str, source: str, entry: str, group: str = "warmkv.methods") -> Path:
    """Write a distribution with one module and an entry point."""
    file, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{group}]\n{entry}\n",
        f"{info}/RECORD": "".join(f"{path},,\n" for path in (f"{name}.py", f"{info}/METADATA", f"{info}/RECORD")),
    }
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return file


def install(folder: Path, name: str, source: str, entry: str, group: str = "warmkv.methods") -> Path:
    """Install a package that brings a plug-in, and return the folder to put on the path."""
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run([*command, str(wheel(folder, name, source, entry, group))], check=True)
    return target


def python(code: str, site: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_package_outside_adds_a_method_that_is_served(tmp_path):
    ran = python(SERVE, install(tmp_path, "stride_method", STRIDE, "stride = stride_method"))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found == {
        "tokens": 4,
        "kept_tokens": 10,
        "positions": [0, 4, 8, 12, 16, 20, 24, 28, 32, 39],
        "label": "stride@0.2:every=5",
        "schema": "distance of the tokens that are kept (stride)",
    }


@pytest.mark.soak
def test_a_package_outside_adds_a_storage_that_is_served(tmp_path):
    ran = python(
        SERVE_STORAGE, install(tmp_path, "coarse_storage", COARSE, "coarse = coarse_storage", "warmkv.storages")
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    layers, kv_heads, head_dim = found.pop("shape")
    packed, tail = 48, 32  # of 71 entries: what the residual leaves, in whole groups
    assert found == {
        "as_the_slow_reference": {"full+coarse": True, "snapkv@56+ring+coarse:window=8": True},
        "resident_bytes": layers * kv_heads * 2 * head_dim * (packed + 4 * tail),
        "refused": True,
        "label": "full+coarse:residual=64",
        "schema": True,
        "parts": ["torch.uint8"],
    }


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nothing_like_it", "method broken of package broken_method cannot be imported (ModuleNotFoundError"),
        ("from warmkv.policy_spec import PolicySpec", "may import warmkv.policy_spec for types only"),
        ("", "package broken_method offers a method broken, but broken_method registers none"),
        (STRIDE.replace('"stride"', '"snapkv"'), "a method called snapkv is registered already"),
        (STRIDE.replace('"stride"', '"a+b"'), "method 'a+b': write the name with letters"),
        (STRIDE.replace('"stride"', '"shotkv"'), "method shotkv: this name stands for something else already"),
        (COARSE.replace('"coarse"', '"kivi4"'), "a storage called kivi4 is registered already"),
        (
            COARSE.replace('alias = "coarse"', '"broken"; alias = "snapkv"'),
            "storage broken: its name or alias stands for",
        ),
        (COARSE.replace('alias = "coarse"', '"broken"; alias = "fp8"'), "storage broken: its name or alias stands for"),
    ],
)
def test_a_package_that_cannot_be_used_is_named_with_what_is_wrong(tmp_path, source, says):
    name = "shotkv" if "shotkv" in source else "broken"
    group = "warmkv.storages" if "StorageFormat" in source else "warmkv.methods"
    wheel(tmp_path, "broken_method", source, f"{name} = broken_method", group)
    with zipfile.ZipFile(tmp_path / "broken_method-1.0-py3-none-any.whl") as archive:
        archive.extractall(tmp_path / "site")
    ran = python("import warmkv.policy_spec", tmp_path / "site")
    assert ran.returncode != 0
    assert says in ran.stderr.strip().splitlines()[-1]


def test_a_name_is_taken_once_and_in_time():
    class Late(Method):
        name = "late"

    with pytest.raises(PluginError, match="late is registered too late: name it in entry points"):
        METHODS.register(Late)
    with pytest.raises(PluginError, match="a method called snapkv is registered already"):
        METHODS.register(METHODS["snapkv"])
    empty: Registry[type[Method]] = Registry("method", METHODS.folder, "warmkv.nothing")
    empty.load()  # importing the modules again registers nothing anew
    assert not empty
    assert list(METHODS) == sorted(METHODS)


def test_a_knob_means_the_same_in_all_methods(monkeypatch):
    class Other(Method):
        name = "other"
        knobs = (SINKS.by_default(0), WINDOW.by_default(5))  # other defaults are fine

    monkeypatch.setitem(METHODS, "other", Other)
    assert policy_spec._all_knobs() == policy_spec.KNOBS
    for knob in (replace(WINDOW, le=10), replace(WINDOW, name="budget"), replace(WINDOW, name="label")):
        monkeypatch.setattr(Other, "knobs", (knob,))
        with pytest.raises(PluginError, match=f"{knob.name}, a knob of other, has another meaning already"):
            policy_spec._all_knobs()
