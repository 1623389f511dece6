"""The certificates of a server: its own, and those of the authorities that sign its clients' certificates."""

from __future__ import annotations

import ssl

from messagestore.errors import ConfigError
from messagestore.serve.rereading import Reread


class Certificates:
    """TLS settings from files, which may be replaced. A connection keeps those with which it was opened.

    Parameters
    ----------
    cert_file : str
        The server's certificate, and those between it and its authority, as PEM.
    key_file : str
        Its key; empty: `cert_file` has it, too.
    client_ca_file : str
        With it, clients must have a certificate that one of these authorities has signed.

    Raises
    ------
    ConfigError
        The files cannot be used.
    """

    def __init__(self, cert_file: str, key_file: str = "", client_ca_file: str = "") -> None:
        def load() -> ssl.SSLContext:
            return _context(cert_file, key_file, client_ca_file)

        self._files = Reread([path for path in (cert_file, key_file, client_ca_file) if path], load)

    def context(self) -> ssl.SSLContext:
        """The settings for a new connection."""
        return self._files.current()


def _context(cert_file: str, key_file: str, client_ca_file: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An empty password: OpenSSL would ask the terminal for the one of an encrypted key.
        context.load_cert_chain(cert_file, key_file or None, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--cert-file, --key-file: found {cert_file} and {key_file or 'no other file'}, which cannot be used "
            f"({_words(error)}); allowed are a certificate and its key in PEM form, without a password",
            key="--cert-file",
            value=cert_file,
        ) from None
    if client_ca_file:
        try:
            context.load_verify_locations(client_ca_file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--client-ca-file: found {client_ca_file}, which cannot be used ({_words(error)}); allowed is a file "
                f"of certificates in PEM form",
                key="--client-ca-file",
                value=client_ca_file,
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _words(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
