"""Signatures of requests, as RocketMQ's ACL 1.0 and 2.0 check them.

A signed request has the fields `AccessKey` and `Signature`, and `SecurityToken` if the credentials have one. The
signature is Base64 of HMAC-SHA1 over the values of all other fields, in the order of their names, and the body.

RocketMQ acl/common/AclClientRPCHook.java, AclUtils.java.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from messagestore.errors import ConfigError

_LINE = re.compile(r"""\s*(\w+)\s*[:=]\s*(["']?)(.*?)\2\s*""")
_NAMES = ("accessKey", "secretKey", "securityToken")
_FILE_LIMIT = 64 * 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who signs requests.

    Parameters
    ----------
    access_key, secret_key : str
    security_token : str
        The token of temporary credentials; empty: none is sent.
    """

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str = field(default="", repr=False)

    @classmethod
    def read(cls, path: str) -> Credentials:
        """Read a file with a line for `accessKey` and one for `secretKey`, as in RocketMQ's `conf/tools.yml`.

        Raises
        ------
        ConfigError
            The file does not say both.
        OSError
            The file cannot be read.
        """
        with open(path, encoding="utf-8") as file:
            text = file.read(_FILE_LIMIT)

        pairs = {}
        for line in text.splitlines():
            match = _LINE.fullmatch(line)
            if match is not None and match[1] in _NAMES:
                pairs[match[1]] = match[3]

        if not pairs.get("accessKey") or not pairs.get("secretKey"):
            raise ConfigError(
                f"option credentialsFile: found no accessKey and secretKey in {path}; allowed is a file with the lines "
                f"`accessKey: ...` and `secretKey: ...`",
                key="credentialsFile",
                value=path,
            )
        return cls(pairs["accessKey"], pairs["secretKey"], pairs.get("securityToken", ""))

    def signed(self, fields: Mapping[str, str], body: bytes | memoryview) -> dict[str, str]:
        """The fields of a request, with those that a broker checks."""
        signed = {**fields, "AccessKey": self.access_key}
        if self.security_token:
            signed["SecurityToken"] = self.security_token

        digest = hmac.new(self.secret_key.encode(), digestmod=hashlib.sha1)
        for name in sorted(signed):
            digest.update(signed[name].encode())
        digest.update(body)

        signed["Signature"] = base64.b64encode(digest.digest()).decode()
        return signed
