"""Changing the policy of a service on a real Ray: it is in force everywhere at once, and outlives what is killed."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
import requests

from tests import grafana
from tests.e2e.conftest import GRAFANA, OPERATOR
from tests.polling import PATIENCE, until
from warmkv.platform.control import control_name, start_control
from warmkv.platform.named_actors import NAMESPACE

pytestmark = pytest.mark.cluster

TEXT = "class Heap:\n    def push(self, item):\n        self.items.append(item)\n" * 30


@pytest.fixture(autouse=True)
def as_configured(cluster):
    """The other tests find the service as it was started."""
    yield
    cluster.change("POST", "/rollback", to=0)


def policy(cluster: Any, path: str = "") -> Any:
    return requests.get(f"{cluster.url}/v1/warmkv/policy{path}", headers=OPERATOR, timeout=PATIENCE).json()


def ask(cluster: Any, key: str, replica: str | None = None, ttl: str = "5m") -> Any:
    block = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral", "ttl": ttl}}
    warmkv = {"seed": 1, **({"replica": replica} if replica else {})}
    message = cluster.anthropic(key).messages.create(
        model=cluster.config.model.name,
        max_tokens=4,
        messages=[{"role": "user", "content": [block, {"type": "text", "text": "Why?"}]}],
        extra_body={"temperature": 0, "warmkv": warmkv},
    )
    return message.usage


def test_a_change_is_in_force_for_the_next_answer_of_every_replica(cluster):
    names = list(cluster.replicas())
    before = ask(cluster, "changed")
    changes = {
        "compression.policy": "snapkv@0.2",
        "prefix_cache.ttls": {"5m": 300, "2h": 7200},
        "pricing.write": {"5m": 1.25, "2h": 4},
        "pricing.output": 150,
    }
    answered = cluster.change(changes=changes)
    version = answered["version"]
    assert [part["version"] for part in answered["parts"].values()] == [version] * cluster.config.cluster.gateways
    for name in names:
        usage = ask(cluster, f"changed {name}", name, "2h")
        assert usage.warmkv["replica"] == name
        assert (usage.warmkv["policy"], usage.warmkv["policy_version"]) == ("snapkv@0.2", version)
        assert usage.warmkv["kept_tokens"] < before.warmkv["kept_tokens"]
        assert usage.warmkv["price"]["output"] == pytest.approx(usage.output_tokens * 150e-6)
        assert usage.warmkv["price"]["write"]["2h"] == pytest.approx(usage.cache_creation_input_tokens * 12e-6)
        assert ask(cluster, f"changed {name}", name, "2h").cache_read_input_tokens == usage.cache_creation_input_tokens


def test_a_request_in_flight_ends_as_it_began(cluster):
    version = policy(cluster)["version"]
    with cluster.anthropic("in flight").messages.stream(
        model=cluster.config.model.name,
        max_tokens=300,
        messages=[{"role": "user", "content": "def f("}],
        extra_body={"temperature": 0, "warmkv": {"ignore_eos": True}},
    ) as stream:
        events = iter(stream)
        next(events)
        changes = {"compression.policy": "snapkv@0.2", "pricing.output": 150, "prefix_cache.ttls": {"5m": 1}}
        assert cluster.change(changes=changes)["version"] == version + 1
        (usage,) = (event.usage for event in events if event.type == "message_delta")
    assert (usage.warmkv["policy"], usage.warmkv["policy_version"]) == ("full", version)
    assert usage.warmkv["price"]["output"] == pytest.approx(300 * 15e-6)


def test_the_router_goes_by_the_parameters_in_force(cluster):
    names = list(cluster.replicas())
    home = ask(cluster, "routed").warmkv["replica"]
    (other,) = (name for name in names if name != home)
    cluster.change(changes={"routing.allow_request_replica": False})
    with pytest.raises(anthropic.PermissionDeniedError, match="allow_request_replica"):
        ask(cluster, "routed", other)

    def sent_home() -> bool:  # as soon as the router knows what is warm there
        return bool(ask(cluster, "routed").warmkv["replica"] == home)

    until(sent_home, "a request that names no replica goes where its prefix is warm")
    cluster.change(changes={"routing.allow_request_replica": True})
    assert ask(cluster, "routed", other).warmkv["replica"] == other
    cluster.change(changes={"routing.policy": "power_of_two"})
    assert {ask(cluster, f"routed {number}").warmkv["replica"] for number in range(20)} == set(names)


def test_refusals_come_through_the_actor(cluster):
    for changes, more, status, says in (
        ({"routing.overlod": 3}, {}, 400, "did you mean 'overload'"),
        ({"routing.overload": 3}, {"version": 10**6}, 409, "is not in force"),
    ):
        body = {"changes": changes, "why": "test", **more}
        answer = requests.put(f"{cluster.url}/v1/warmkv/policy", json=body, headers=OPERATOR, timeout=PATIENCE)
        message = answer.json()["error"]["message"]
        assert answer.status_code == status
        assert says in message
        assert "Traceback" not in message


def click(cluster: Any, title: str, action: str, row: dict[str, Any], key: str = OPERATOR["x-api-key"], **asked: str):
    """Send an action of a dashboard's table as a browser does: its preflight, then the request. Returns the answer."""
    filled = {"key": key, **asked}
    sent = grafana.request(grafana.tables()[title], action, row, filled, {"gateway": cluster.url})
    headers, origin = {**sent.headers}, {"origin": GRAFANA}
    names = ",".join(sorted(name.lower() for name in headers))
    asks = {"access-control-request-method": sent.method, "access-control-request-headers": names}
    preflight = requests.options(sent.url, headers={**origin, **asks}, timeout=PATIENCE)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, GRAFANA)
    assert sent.method in preflight.headers["access-control-allow-methods"]
    allowed = preflight.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert set(names.split(",")) <= set(allowed)
    answer = requests.request(sent.method, sent.url, json=sent.body, headers={**headers, **origin}, timeout=PATIENCE)
    assert answer.headers["access-control-allow-origin"] == GRAFANA
    return answer


def test_actions_of_the_dashboards_change_the_cluster_and_nobody_elses_do(cluster):
    ttls, before = {"5m": 600.0, "1h": 3600.0}, policy(cluster)["version"]
    figures = {"hit_rate": 0.5, "bytes": 1000, "ttft_p99": 0.2, "quality": None}
    replayed = {"candidate": "ttl-double", "restart": [], "figures": figures, "pareto": True, "rank": 1}
    table = {"version": before, "candidates": [{**replayed, "changes": {"prefix_cache.ttls": ttls}}]}
    (best,) = grafana.rows(grafana.tables()["What other settings would do"], table)

    def row(title: str, of: str, **wanted: Any) -> dict[str, Any]:
        """A row of a table as it is read from the cluster now."""
        found = grafana.rows(grafana.tables()[title], policy(cluster, of))
        return next(one for one in found if wanted.items() <= one.items())

    def own() -> dict[str, Any]:
        return row("TTLs and budget", "")

    def setting() -> dict[str, Any]:
        return row("Live settings", "", setting="compression.policy")

    def version(number: int) -> dict[str, Any]:
        return row("Versions", "/history", version=number)

    cluster.change(changes={"compression.policy": "snapkv@0.5"})
    first = before + 1
    best["version"] = first
    actions = [  # and what is different from the configuration at start then
        (("What other settings would do", "Apply candidate", lambda: best), {}, ("snapkv@0.5", ttls)),
        (("TTLs and budget", "Set budget", own), {"budget": "0.3", "why": "memory"}, ("snapkv@0.3", ttls)),
        (("Versions", "Roll back", lambda: version(first)), {"why": "worse"}, ("snapkv@0.5", None)),
        (("TTLs and budget", "Set TTL", own), {"ttls": json.dumps(ttls), "why": "more"}, ("snapkv@0.5", ttls)),
        (("Live settings", "Change", setting), {"value": '"snapkv@0.2"', "why": "a try"}, ("snapkv@0.2", ttls)),
        (("Versions", "Roll back to the start", lambda: version(first)), {"why": "as it was"}, (None, None)),
    ]
    for number, ((title, action, of), asked, (compression, lives)) in enumerate(actions, start=first):
        assert click(cluster, title, action, of(), key="nobody in particular", **asked).status_code == 403
        assert policy(cluster)["version"] == number
        applied = click(cluster, title, action, of(), **asked)
        assert (applied.status_code, applied.json()["version"]) == (200, number + 1), applied.text
        settings = policy(cluster)["settings"]
        start = cluster.config
        assert settings["compression.policy"] == (compression or start.compression.policy.label)
        assert settings["prefix_cache.ttls"] == (lives or start.prefix_cache.ttls)
    assert ask(cluster, "after the actions").warmkv["policy_version"] == policy(cluster)["version"]


def test_the_versions_are_there_for_an_application_that_is_deployed_anew(cluster):
    version = cluster.change(changes={"routing.overload": 3})["version"]
    start_control(cluster.config.cluster.application, cluster.config.control)
    found = until(lambda: followed(cluster), "the gateway follows the new actor")
    assert (found["version"], found["settings"]["routing.overload"]) == (version, 3)


def followed(cluster: Any) -> Any:
    """Return the policy, once every gateway has reported to the actor."""
    try:
        found = policy(cluster)
        return found if len(found["parts"]) == cluster.config.cluster.gateways else None
    except (requests.RequestException, KeyError):
        return None


def test_the_version_in_force_outlives_everything_that_is_killed(cluster):
    import ray

    version = cluster.change(changes={"compression.policy": "snapkv@0.2"})["version"]
    history = policy(cluster, "/history")
    victim = next(iter(cluster.replicas()))
    (gateway,) = policy(cluster)["parts"]
    application = cluster.config.cluster.application
    for name, namespace in (
        (f"SERVE_REPLICA::{application}#replica#{victim}", "serve"),
        (f"SERVE_REPLICA::{application}#gateway#{gateway}", "serve"),
        (control_name(application), NAMESPACE),
    ):
        ray.kill(ray.get_actor(name, namespace=namespace), no_restart=name != control_name(application))

    def recovered() -> Any:
        try:
            parts, replicas = policy(cluster)["parts"], cluster.replicas()
        except (requests.RequestException, KeyError):
            return None
        new = [name for name in replicas if name != victim]
        return new if gateway not in parts and len(parts) == 1 and len(new) == 2 else None

    names = until(recovered, "a new gateway and a new replica")
    assert [part["version"] for part in policy(cluster)["parts"].values()] == [version]
    assert policy(cluster, "/history") == history
    for name in names:

        def answers(name: str = name) -> bool:  # the directory may know a replica before Serve sends to it
            try:
                usage = ask(cluster, f"killed {name}", name).warmkv
            except anthropic.APIStatusError:
                return False
            assert (usage["policy"], usage["policy_version"]) == ("snapkv@0.2", version)
            return bool(usage["replica"] == name)

        until(answers, "the replica answers")
    until(lambda: victim not in cluster.replicas(), "the directory has forgotten the replica")


def test_the_console_its_figures_and_the_audit_log_are_those_of_the_service(cluster):
    ask(cluster, "for the console")
    version = cluster.change(changes={"routing.overload": 3}, why="console")["version"]
    assert "<title>warmkv console</title>" in requests.get(f"{cluster.url}/console", timeout=PATIENCE).text
    live = requests.get(f"{cluster.url}/v1/warmkv/live", headers=OPERATOR, timeout=PATIENCE).json()
    assert live["requests"]["ok"] >= 1
    assert (live["version"], live["gateways"]) == (version, cluster.config.cluster.gateways)
    assert live["replicas"]["serving"] == len(cluster.replicas())
    assert live["replicas"]["weight_bytes"] > 0
    file = cluster.access_log.parent / "audit" / "audit.jsonl"

    def written() -> bool:
        actions = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return any((one["why"], one["outcome"]) == ("console", f"version {version}") for one in actions)

    until(written, "the change is in the audit log")
