"""Thinking: signatures of its blocks."""

from __future__ import annotations

import pytest

from warmkv.platform.gateway.apis.thinking import sign, verify


def test_a_signature_holds_for_its_text_and_secret_only():
    signature = sign("Two and two are four.", b"secret")
    assert verify("Two and two are four.", signature, b"secret")
    assert not verify("Two and two are five.", signature, b"secret")
    assert not verify("Two and two are four.", signature, b"another")


@pytest.mark.parametrize("signature", ["", "made up", "ü"])
def test_what_is_no_signature_is_not_verified(signature):
    assert not verify("text", signature, b"secret")
