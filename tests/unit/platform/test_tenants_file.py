"""Tenants added, rotated and revoked in a file while gateways run; a file that is wrong changes nothing."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests import clocks
from tests.unit.platform.asgi import DAY, SECRET, Gateway, as_flag, becomes
from warmkv.config import ConfigError, OperatorConfig, TenantConfig, load
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.tenants import Caller, Keyring, authenticate, hash_key
from warmkv.platform.tenants_file import Tenants, find_tenant, parse_tenants


def tenant(name: str, *keys: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "keys": [{"sha256": hash_key(key)} for key in keys], **more}


def document(*tenants: dict[str, Any], operators: tuple[dict[str, Any], ...] = ()) -> str:
    return yaml.safe_dump({"tenants": list(tenants), "operators": list(operators)})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(document(tenant("team", "old")))
    return path


def tenants_of(file: Path, *flags: str) -> tuple[Tenants, list[str]]:
    """Return the tenants, and what is told of every file that was read."""
    told: list[str] = []
    gateway = load(flags=[f"gateway.tenants_file={file}", *flags], environ={}).gateway
    return Tenants(gateway, SECRET, told.append), told


def who(tenants: Tenants, key: str, now: float = DAY) -> str | None:
    """Return the caller with a key, or None if it is refused."""
    try:
        return authenticate({"x-api-key": key}, tenants.keyring, SECRET, datetime.fromtimestamp(now, UTC)).name
    except ApiError:
        return None


def test_nobody_is_known_by_no_key(file: Path) -> None:
    """The hash of an empty key, as a script prints it whose variable is not set, would let everybody in."""
    for key in ("", "Bearer "):
        with pytest.raises(ValidationError, match="hash of an empty key"):
            TenantConfig.model_validate(tenant("team", ""))
        with pytest.raises(ValidationError, match="hash of an empty key"):
            OperatorConfig.model_validate({"name": "ops", "key_sha256": hash_key("")})
        file.write_text(document(tenant("team", "")))
        with pytest.raises(ConfigError, match="hash of an empty key"):
            tenants_of(file)
        everybody = Keyring({hash_key(""): (Caller("team", None, operator=True), None)}, None)
        with pytest.raises(ApiError, match="is required"):
            authenticate({"x-api-key": "", "authorization": key}, everybody, SECRET, datetime.now(UTC))


def test_a_key_that_is_there_twice_is_refused_with_its_line(file: Path) -> None:
    file.write_text(document(tenant("team", "old")) + document(tenant("other", "new")))
    with pytest.raises(ConfigError, match=r"'operators' is there twice, first in line \d"):
        tenants_of(file)


def test_a_running_gateway_follows_the_file(file: Path, tmp_path: Path) -> None:
    """Added, rotated, revoked and, where the file is wrong, kept: without a restart, and shown to operators."""
    operator = as_flag("gateway.operators", [tenant("ops", "ops'")])
    gateway = Gateway(tmp_path / "policy", f"gateway.tenants_file={file}", operator)

    def write(text: str) -> None:
        beside = file.with_suffix(".new")
        beside.write_text(text)
        beside.replace(file)  # a thread may be reading it

    async def until(key: str, status: int) -> None:
        async def answered() -> bool:
            return (await gateway.message(key)).status == status

        await becomes(answered, lambda: clocks.skip(5))

    async def state() -> Any:
        return (await gateway.request("GET", "/v1/warmkv/tenants", "ops'")).body

    async def scenario() -> None:
        async with gateway.app.router.lifespan_context(gateway.app):
            assert [(await gateway.message(key)).status for key in ("old", "new", "")] == [200, 401, 401]
            write(document(tenant("team", "old", "new"), tenant("other", "other's")))
            await until("other's", 200)
            assert [(await gateway.message(key)).status for key in ("old", "new")] == [200, 200]
            write(document(tenant("team", "new")))
            await until("old", 401)
            assert [(await gateway.message(key)).status for key in ("other's", "new")] == [401, 200]
            write("tenants: [{nam: x}]")

            async def refused() -> bool:
                return (await state())["file"]["fault"] is not None

            await becomes(refused, lambda: clocks.skip(5))
            shown = await state()
            assert "tenants.0.nam: unknown key; did you mean 'name'?" in shown["file"]["fault"]
            assert shown["gateway"] == "this gateway"
            assert [one["name"] for one in shown["tenants"]] == ["team"]
            assert hash_key("new") not in str(shown)
            assert (await gateway.message("new")).status == 200
            write(document(tenant("team", "mended")))
            await until("mended", 200)

    clocks.run(scenario(), clocks.SkippingLoop)
    read = [labels["result"] for name, _, labels in gateway.metrics.seen if name == "warmkv_tenants_read"]
    assert read == ["taken", "taken", "taken", "refused", "taken"]
    refused = [value for name, value, _ in gateway.metrics.seen if name == "warmkv_tenants_file_refused"]
    assert refused == [0, 0, 0, 1, 0]


def test_a_secret_s_folder_whose_link_is_swapped_is_seen(tmp_path: Path) -> None:
    """As Kubernetes does it: `tenants.yaml` links into `..data`, which links to the folder of the day."""
    for number, key in enumerate(("first", "second")):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "tenants.yaml").write_text(document(tenant("team", key)))
        os.utime(tmp_path / f"..{number}" / "tenants.yaml", (1, 1))
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "tenants.yaml").symlink_to("..data/tenants.yaml")
    tenants, told = tenants_of(tmp_path / "tenants.yaml")
    assert (who(tenants, "first"), who(tenants, "second")) == ("team", None)
    (tmp_path / "..new").symlink_to("..1")
    (tmp_path / "..new").replace(tmp_path / "..data")
    tenants.reload()
    assert (who(tenants, "first"), who(tenants, "second")) == (None, "team")
    tenants.reload()
    assert told == ["taken", "taken"]


WRONG = [
    ("", "expected a mapping"),
    ("[]", "expected a mapping"),
    ("operators: []", "tenants: Field required"),  # cut short: not a list of nobody
    ("tenants: [", "not YAML"),
    ("tenants: [{name: a}]", "a has no key"),
    ("tenants: [{name: a, key_sha256: short}]", "tenants.0.key_sha256"),
    ("[" * 400, "not YAML"),
    ('{"tenants": [], "tenants": []}', "'tenants' is there twice"),
    (json.dumps({"tenants": [tenant("\ud83d", "k")]}), "half of a surrogate pair"),
    (document(tenant("a", "k"), tenant("b", "k")), "is that of tenant a and of tenant b"),
    (document(tenant("a", "inline's")), "is that of tenant inline and of tenant a"),
    (document(tenant("a", "k"), operators=(tenant("a", "k"),)), "is that of tenant a and of operator a"),
    (document(operators=(tenant("autopilot", "k"),)), "no operator may be named autopilot"),
    (document({**tenant("autopilot", "k"), "operator": True}), "no operator may be named autopilot"),
    (document(tenant("a", "1", rights=["policy"]), tenant("a", "2")), "listed twice"),
    (document(tenant("a", "1", limits={"requests_per_minute": -1})), "requests_per_minute"),
    (document(tenant("a", "1", rights=["everything"])), "rights"),
    ("tenants: [{name: a, keys: [{sha256: " + "0" * 64 + ", expires: 2026-01-01T00:00:00}]}]", "timezone"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_a_wrong_file_is_refused_as_a_whole_and_told_once(file: Path, text: str, says: str) -> None:
    inline = as_flag("gateway.tenants", [tenant("inline", "inline's")])
    tenants, told = tenants_of(file, inline)
    for _ in range(2):
        file.write_text(text)
        tenants.reload()
    assert (who(tenants, "old"), who(tenants, "inline's"), who(tenants, "k")) == ("team", "inline", None)
    assert says in tenants.status()["file"]["fault"]
    assert told == ["taken", "refused"]
    with pytest.raises(ConfigError, match=r"gateway\.tenants_file"):
        tenants_of(file, inline)
    file.write_text(document(tenant("team", "new")))
    tenants.reload()
    assert (who(tenants, "old"), who(tenants, "new"), told[2:]) == (None, "team", ["taken"])
    assert tenants.status()["file"]["fault"] is None


def test_a_file_that_is_gone_leaves_those_who_were_there(file: Path) -> None:
    tenants, told = tenants_of(file)
    text = file.read_text()
    file.unlink()
    tenants.reload()
    tenants.reload()
    assert who(tenants, "old") == "team"
    assert "No such file" in tenants.status()["file"]["fault"]
    with pytest.raises(ConfigError, match="No such file"):
        tenants_of(file)
    file.write_text(text)
    tenants.reload()
    assert told == ["taken", "refused", "taken"]


def test_no_tenants_in_the_file_is_nobody_not_everybody(file: Path) -> None:
    file.write_text("tenants: []")
    tenants, _ = tenants_of(file)
    assert [who(tenants, key) for key in ("", "old")] == [None, None]


def test_a_key_ends_when_it_says(file: Path) -> None:
    ends = datetime.fromtimestamp(DAY + 60, UTC).isoformat()
    keys = [{"sha256": hash_key("old"), "expires": ends}, {"sha256": hash_key("new")}]
    file.write_text(yaml.safe_dump({"tenants": [{"name": "team", "keys": keys}]}))
    tenants, _ = tenants_of(file)
    assert [who(tenants, "old", DAY + late) for late in (0, 59, 60, 61)] == ["team", "team", None, None]
    assert who(tenants, "new", DAY + 10**8) == "team"


def test_a_tenant_stays_itself_whatever_its_key_and_wherever_it_is_listed(file: Path) -> None:
    """Its prefixes are salted by its name: a new key reads what the old one wrote."""
    (old,) = tenants_of(file)[0].status()["tenants"]
    file.write_text(document(tenant("team", "new")))
    (new,) = tenants_of(file)[0].status()["tenants"]
    file.write_text(document())
    (inline,) = tenants_of(file, as_flag("gateway.tenants", [tenant("team", "k")]))[0].status()["tenants"]
    assert old["label"] == new["label"] == inline["label"]


def test_json_and_the_defaults_of_all_tenants(file: Path) -> None:
    listed = [tenant("own", "k", rights=[], limits={"requests_per_minute": 9}), tenant("usual", "u")]
    file.write_text(json.dumps({"tenants": listed}))
    limits = as_flag("gateway.limits", {"requests_per_minute": 5, "tokens_per_minute": 7})
    tenants, _ = tenants_of(file, 'gateway.rights=["policy"]', limits)
    own, usual = tenants.status()["tenants"]
    assert (own["rights"], usual["rights"]) == ([], ["policy"])
    assert [(one["limits"]["requests_per_minute"], one["limits"]["tokens_per_minute"]) for one in (own, usual)] == [
        (9, 7),
        (5, 7),
    ]


def test_packs_find_tenants_of_the_file(file: Path) -> None:
    config = load(flags=[f"gateway.tenants_file={file}"], environ={})
    assert find_tenant("team", config, SECRET).label == tenants_of(file)[0].status()["tenants"][0]["label"]
    with pytest.raises(LookupError, match="has team"):
        find_tenant("nobody", config, SECRET)
    file.write_text("tenants: 3")
    with pytest.raises(ConfigError, match="tenants_file"):
        find_tenant("team", config, SECRET)


@pytest.mark.parametrize("indent", [None, "\t"])
def test_all_json_is_taken(indent: str | None) -> None:
    """Take what PyYAML does not read, too: tabs, and characters beyond the BMP as `json.dumps` writes them."""
    (found,) = parse_tenants(json.dumps({"tenants": [tenant("a \U0001f600", "k")]}, indent=indent).encode()).tenants
    assert found.name == "a \U0001f600"


@given(st.binary(max_size=200))
def test_whatever_is_in_the_file_is_taken_or_refused_with_a_reason(data: bytes) -> None:
    with suppress(ConfigError):  # nothing else
        parse_tenants(data)
