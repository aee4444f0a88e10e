"""`warmkv record` from the command line."""

import json

import pytest
from typer.testing import CliRunner

from warmkv.cli import app
from warmkv.cli.serving import record as command


@pytest.fixture
def record(tmp_path):
    def call(*arguments):
        return CliRunner().invoke(app, ["record", str(tmp_path / "logs" / "access.jsonl"), *arguments])

    return call


@pytest.mark.parametrize("upstream", ["api.anthropic.com", "ftp://x", "http://", "https://x/v1?key=1"])
def test_an_upstream_is_the_address_of_a_server(record, upstream):
    result = record("--upstream", upstream)
    assert result.exit_code == 2
    assert "give the address of a server" in result.output


def test_a_tokenizer_that_is_none_is_refused(record, tmp_path):
    result = record("--upstream", "http://x", "--tokenizer", str(tmp_path))
    assert result.exit_code == 2
    assert "tokenizer.json" in result.output


def test_it_tells_at_the_end_what_was_written(record, tmp_path, monkeypatch):
    async def run(proxy, host, port, told):
        assert (host, port) == ("127.0.0.1", 0)

    monkeypatch.setattr(command, "serve_until_stopped", run)
    result = record("--upstream", "http://x", "--port", "0", "--json")
    assert result.exit_code == 0, result.output
    log = str(tmp_path / "logs" / "access.jsonl")
    assert json.loads(result.output) == {"log": log, "passed": 0, "recorded": 0, "left_out": 0}
    assert (tmp_path / "logs" / ".access.jsonl.state").exists()
