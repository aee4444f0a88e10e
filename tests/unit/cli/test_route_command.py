"""`warmkv route` from the command line."""

import json

from typer.testing import CliRunner

from warmkv.cli import app
from warmkv.cli.serving import route as command
from warmkv.platform.engine_router.prompts import Prompt

SERVERS = ("--engine", "http://a:1/", "--engine", "http://b:1")


def test_servers_are_named_once_and_by_their_address():
    for arguments, said in [
        (("--engine", "a:1"), "--engine a:1: give the address of a server"),
        ((*SERVERS, "--engine", "http://a:1"), "a server is named twice"),
        ((), "Missing option"),
        ((*SERVERS, "--events", "tcp://a:5557"), "1 for 2 servers"),
        ((*SERVERS, "--events", "tcp://a:5557", "--events", "a"), "'a' is no address of events"),
    ]:
        result = CliRunner().invoke(app, ["route", *arguments])
        assert result.exit_code == 2
        assert said in result.output


def test_it_tells_at_the_end_where_requests_went(tmp_path, monkeypatch):
    async def run(proxy, host, port, told):
        proxy._router.choose(0, Prompt())

    monkeypatch.setattr(command, "serve_until_stopped", run)
    log = tmp_path / "logs" / "access.jsonl"
    result = CliRunner().invoke(app, ["route", *SERVERS, "--log", str(log), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (list(found["engines"]), found["routed"]) == (["http://a:1", "http://b:1"], {"cold": 1})
    assert found["log"] == {"passed": 0, "recorded": 0, "left_out": 0}
    assert log.exists()
    assert "routing.policy" in CliRunner().invoke(app, ["route", *SERVERS, "--set", "routing.policy=x"]).output


def test_servers_with_events_keep_api_keys_apart_unless_told_otherwise(monkeypatch):
    ran = []

    async def run(proxy, host, port, told):
        ran.append((list(proxy._feeds), proxy._secret, told))

    monkeypatch.setattr(command, "serve_until_stopped", run)
    monkeypatch.setenv("WARMKV_SALT", "secret")
    events = ("--events", "tcp://a:5557,tcp://a:5558", "--events", "none")
    for arguments in ((), events, (*events, "--shared-prefixes"), ("--tenant-salts",)):
        assert CliRunner().invoke(app, ["route", *SERVERS, *arguments]).exit_code == 0
    assert [feeds for feeds, _, _ in ran] == [[], ["http://a:1"], ["http://a:1"], []]
    assert [secret for _, secret, _ in ran] == [None, "secret", None, "secret"]
    assert "without KV events, by what they are sent: http://b:1" in ran[1][2]


def test_each_data_parallel_rank_is_followed_and_routed_to_by_itself(monkeypatch):
    ran = []

    async def run(proxy, host, port, told):
        ran.append(proxy)

    monkeypatch.setattr(command, "serve_until_stopped", run)
    events = ("--events", "tcp://a:5557,tcp://a:5657,ranks=2", "--events", "none")
    result = CliRunner().invoke(app, ["route", *SERVERS, *events, "--shared-prefixes", "--json"])
    assert result.exit_code == 0, result.output
    (proxy,) = ran
    assert list(proxy.figures()["engines"]) == ["http://a:1#0", "http://a:1#1", "http://b:1"]
    assert [feed._endpoints[:2] for feed in proxy._feeds.values()] == [
        ("tcp://a:5557", "tcp://a:5657"),
        ("tcp://a:5558", "tcp://a:5658"),
    ]
