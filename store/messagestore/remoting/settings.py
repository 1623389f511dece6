"""How name servers and brokers are reached: plain values, which travel to tasks."""

from __future__ import annotations

from dataclasses import dataclass

JSON, ROCKETMQ = "JSON", "ROCKETMQ"
SERIALIZATIONS = (JSON, ROCKETMQ)


@dataclass(frozen=True, slots=True)
class RemotingSettings:
    """How name servers and brokers are reached.

    Secrets are in files that each process reads when it connects.

    Parameters
    ----------
    credentials_file : str
        A file with `accessKey` and `secretKey`; empty: requests are not signed.
    use_tls : bool
        Whether connections are encrypted.
    ca_file : str
        The certificates that a broker's is checked against; empty: those of the system.
    cert_file, key_file : str
        The client's own certificate and its key. Without `key_file`, `cert_file` has both.
    check_host_name : bool
        Whether a broker's certificate must name its host. RocketMQ's own clients do not look at the name.
    retry_timeout_s : float
        For how long a request is repeated while the broker is busy or does not answer.
    serialization : str
        How the headers of requests are written: "JSON" or "ROCKETMQ". A broker answers alike.
    """

    credentials_file: str = ""
    use_tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    check_host_name: bool = True
    retry_timeout_s: float = 30.0
    serialization: str = JSON
