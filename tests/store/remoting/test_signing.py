"""Signatures as RocketMQ's ACL computes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from messagestore import ConfigError
from messagestore.remoting.signing import Credentials


def test_a_signature_is_javas() -> None:
    """The value is that of AclUtils.calSignature(AclUtils.combineRequestContent(..)) of RocketMQ 5.3.3."""
    signed = Credentials("rocketmq2", "12345678").signed({"topic": "flights", "queueId": "0"}, b"body")
    assert signed == {
        "topic": "flights",
        "queueId": "0",
        "AccessKey": "rocketmq2",
        "Signature": "t+SbD98h41rEy45abx7tmSNCIO0=",
    }


def test_a_token_is_signed_too() -> None:
    credentials = Credentials("rocketmq2", "12345678", "token")
    signed = credentials.signed({}, b"")
    assert signed["SecurityToken"] == "token"
    assert signed["Signature"] != Credentials("rocketmq2", "12345678").signed({}, b"")["Signature"]


@pytest.mark.parametrize(
    "text",
    [
        "accessKey: rocketmq2\nsecretKey: 12345678\n",
        "# for Spark\naccessKey=rocketmq2\nsecretKey = '12345678'\nother=1\n",
    ],
)
def test_the_file_is_that_of_rocketmqs_tools(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tools.yml"
    path.write_text(text)
    assert Credentials.read(str(path)) == Credentials("rocketmq2", "12345678")


def test_a_file_without_a_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tools.yml"
    path.write_text("accessKey: rocketmq2\nsecretKey:\n")
    with pytest.raises(ConfigError, match="found no accessKey and secretKey"):
        Credentials.read(str(path))


def test_a_secret_is_in_no_text() -> None:
    assert "12345678" not in repr(Credentials("rocketmq2", "12345678", "token"))
