"""Starts and ends the server of a store.

    bind the address     a port that is taken ends everything before the store is touched
    answer probes        requests get 503 until the store is recovered, and /readyz says why
    recover              as the next writer would, so that what is served is proven
    take spark/serve     one server a store; the file names its address, its run and its process
    sweep                what writers that died before left in the staging folder
    answer requests

A server writes as every writer does: it takes the writer lock for one commit at a time. At its end it refuses new
requests, waits for those that run, closes the store as in a detach, and gives up the lock.
"""

from __future__ import annotations

import ipaddress
import logging
import uuid
from collections.abc import Callable

from messagestore.errors import ConfigError, NotAStoreError, StoreError, StoreLockedError
from messagestore.files.disk import Disk
from messagestore.files.staging_files import sweep
from messagestore.files.writer_lock import WriterLock, probe_java, probe_writer
from messagestore.format.config import StoreConfig
from messagestore.log.refusals import refuse_to_read
from messagestore.log.store_files import Paths, looks_like_store
from messagestore.serve.access import Tokens
from messagestore.serve.certificates import Certificates
from messagestore.serve.hosted import Hosted
from messagestore.serve.limits import Limits
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from messagestore.session import attached_store

_TTL_S = 86_400.0
_log = logging.getLogger("messagestore.serve")


class ServedStore:
    """A store and its server.

    Parameters
    ----------
    root : str
    config : StoreConfig
    host, port : str, int
        Where to listen; port 0: one that is free.
    limits : Limits, optional
    read_only : bool
        Never write; a live broker may write meanwhile.
    create : bool
        Make the store if there is none.
    insecure : bool
        Listen on an address that other hosts reach also without a certificate, or without tokens: then whoever reaches
        it can read and write everything.
    cert_file, key_file, client_ca_file : str
        As `Certificates` has them; without `cert_file`, nothing is encrypted.
    token_file : str
        As `Tokens` has it; empty: nobody is asked for a token.
    metrics : function, optional
        The figures of the store, in Prometheus' text format.
    disk : Disk, optional
        By which the server looks for room, and sweeps.
    """

    def __init__(
        self,
        root: str,
        config: StoreConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
        read_only: bool = False,
        create: bool = False,
        insecure: bool = False,
        cert_file: str = "",
        key_file: str = "",
        client_ca_file: str = "",
        token_file: str = "",
        metrics: Callable[[], bytes] = lambda: b"",
        disk: Disk | None = None,
    ) -> None:
        self.paths, self.config, self.disk = Paths(root), config or StoreConfig(), disk or Disk()
        self.read_only, self._create = read_only, create

        missing = [name for name, path in (("--cert-file", cert_file), ("--token-file", token_file)) if not path]
        if missing and not insecure and not _is_loopback(host):
            raise ConfigError(
                f"--listen: found {host}, which other hosts may reach, without {' and '.join(missing)}; allowed is a "
                f"loopback address such as 127.0.0.1, because otherwise strangers could read what is sent, or read and "
                f"write the store. Give {' and '.join(missing)}, or use --insecure if the network keeps strangers out",
                key="--listen",
                value=host,
            )

        for name, path in (("--key-file", key_file), ("--client-ca-file", client_ca_file)):
            if path and not cert_file:
                raise ConfigError(
                    f"{name}: found without --cert-file. Give the server's certificate, too, or leave {name} out",
                    key=name,
                    value=path,
                )

        limits = limits or Limits()
        if limits.body > limits.memory:
            raise ConfigError(
                f"--body: found {limits.body:,} bytes, and {limits.memory:,} for --memory; allowed is a body that has "
                f"room there, because a larger one waits for it in vain. Give less for --body, or more for --memory",
                key="--body",
                value=limits.body,
            )

        certificates = Certificates(cert_file, key_file, client_ca_file) if cert_file else None
        access = Tokens(token_file) if token_file else None
        self.instance_id = uuid.uuid4().hex
        self._lock: WriterLock | None = None

        hosted = Hosted(self.paths.root, self.config, read_only=read_only)
        service = Service(
            hosted, limits, access, instance_id=self.instance_id, not_ready=self._not_ready, metrics=metrics
        )
        self.server = Server(service, host, port, certificates)

    @property
    def url(self) -> str:
        """Where clients find the store."""
        return self.server.url

    def start(self) -> None:
        """Do all steps, and return when requests are answered.

        Raises
        ------
        NotAStoreError
            There is no store.
        StoreLockedError
            Another server serves the store, or a broker writes it.
        OSError
            The address cannot be listened on.
        """
        if looks_like_store(self.disk, self.paths):
            refuse_to_read(self.disk, self.paths, self.config)
        elif self.read_only or not self._create:
            raise NotAStoreError(
                f"{self.paths.root}: found no message store (no commitlog folder). Give the store's root folder, or "
                f"make a new store with --create",
                path=self.paths.root,
            )

        service = self.server.service
        service.recovering = True
        self.server.start()
        try:
            self._prepare()
        except BaseException:
            self.server.stop()
            self._unlock()
            raise
        service.recovering = False

    def _prepare(self) -> None:
        if self.read_only:
            return  # others may serve and write; there is nothing to lock, and nothing may be changed
        store = attached_store(self.paths.root, self.config)
        with store.writing("the start of a server", config=self.config):
            pass  # this makes the store if there is none, and recovers it
        lock = WriterLock(self.paths.serve_lock)
        try:
            lock.acquire(0, description=f"serves {self.url}, instance {self.instance_id}")
        except StoreLockedError as error:
            raise StoreLockedError(
                f"{self.paths.root}: a server of this store runs already: {error.holder}. Use that one, or stop it "
                f"first. A second server can only be one with --read-only",
                path=error.path,
                holder=error.holder,
            ) from None
        self._lock = lock
        gone = sweep(self.paths.staging, _TTL_S, self.disk)
        if gone:
            _log.info("%s: %s staging files of dead writers were deleted", self.paths.root, len(gone))

    def stop(self, drain_s: float = 30.0) -> bool:
        """End the server, and leave a closed store; return whether all requests had ended in time."""
        ended = self.server.stop(drain_s)
        try:
            if not self.read_only:
                attached_store(self.paths.root, self.config).detach()
        except (StoreError, OSError) as error:
            _log.warning("%s: the store was not closed, and the next writer recovers it: %s", self.paths.root, error)
        finally:
            self._unlock()
        return ended

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _not_ready(self) -> str:
        """Why requests should go elsewhere, in words."""
        if self.read_only:
            return ""
        broker = probe_java(self.paths.root)
        if broker is not None:
            return f"{broker.words} holds the store"
        if self._lock is not None and not self._lock.intact():
            return "spark/serve was removed or replaced"
        return self._no_room()

    def _no_room(self) -> str:
        """Why nothing can be written, in words: there is no room for a frame, or for a file's name."""
        try:
            free, names = self.disk.free(self.paths.root), self.disk.free_names(self.paths.root)
        except OSError as error:
            return f"the store's folder cannot be looked at ({error.strerror or error})"
        needed = self.server.service.limits.frame
        if free < needed:
            return f"the disk is full: {free:,} bytes are free, and one frame of a client may have {needed:,}"
        if names == 0:
            return "the disk is full: its file system cannot make another file (inodes; `df -i` shows them)"
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def server_of(root: str) -> str | None:
    """Which server serves a store, in words; None: none does."""
    return probe_writer(Paths(root).serve_lock)
