"""Thinking: signatures of its blocks."""

from __future__ import annotations

import pytest

from warmkv.platform.gateway.apis.thinking import restore, seal, sign, verify


def test_a_signature_holds_for_its_text_and_secret_only():
    signature = sign("Two and two are four.", b"secret")
    assert verify("Two and two are four.", signature, b"secret")
    assert not verify("Two and two are five.", signature, b"secret")
    assert not verify("Two and two are four.", signature, b"another")


@pytest.mark.parametrize("signature", ["", "made up", "ü"])
def test_what_is_no_signature_is_not_verified(signature):
    assert not verify("text", signature, b"secret")


def test_thinking_that_was_not_shown_comes_back_with_its_signature():
    sealed = seal("Two and two are four.", b"secret")
    assert restore("", sealed, b"secret") == "Two and two are four."
    assert restore("Two and two are four.", sign("Two and two are four.", b"secret"), b"secret") is not None
    for text, signature, secret in (
        ("", sealed, b"another"),
        ("", sealed[1:], b"secret"),
        ("added", sealed, b"secret"),
        ("", "", b"secret"),
        ("", ".", b"secret"),
        ("", sign("Two and two are four.", b"secret"), b"secret"),
    ):
        assert restore(text, signature, secret) is None
