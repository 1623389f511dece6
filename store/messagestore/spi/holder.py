"""Tells the broker that holds a store how far a query that reads the store's folder has got.

A broker keeps the offsets of consumer groups in memory, and overwrites their file. So it is asked to note them, as its
own consumers ask it. Where it listens is in the records: each has the host that stored it. Another broker may listen
there now, so before it is told anything, it has to show the newest record that the query knows, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from messagestore.errors import BrokerError, StoreUnavailableError
from messagestore.format.record import decode_message
from messagestore.read.view import StoreView
from messagestore.remoting import Client, codes
from messagestore.remoting.client import refused
from messagestore.remoting.idle_clients import given_back, taken
from messagestore.remoting.replicas import Request
from messagestore.spi.interface import Queue
from messagestore.spi.location import RemoteSettings
from messagestore.spi.pulls import ANSWERS, tell_progress

ANSWER_TIMEOUT_S = 5.0
"""How long to wait for an answer: a micro-batch waits meanwhile, and the progress can be told later."""
_VIEWED = frozenset({codes.SUCCESS, codes.SYSTEM_ERROR})


def tell_holder(view: StoreView, group: str, offsets: Mapping[Queue, int], holder: str) -> None:
    """Tell the broker that holds a store how far a group has read.

    It is reached with the settings of this process's environment, such as `MESSAGESTORE_CREDENTIALS_FILE`.

    Parameters
    ----------
    holder : str
        Who holds the store, for errors.

    Raises
    ------
    StoreUnavailableError
        None of the messages is there any more, or no broker with this log answers where the newest one was stored.
    BrokerError
        The broker refuses.
    """
    newest = _newest(view, offsets)
    if newest is None and not any(offsets.values()):
        return  # topics without a message: the group has not read anything

    why = f"{view.files.paths.root}: {holder} holds the store, and keeps the offsets of groups"
    data = None if newest is None else view.files.commit_log.record_bytes(newest)
    if newest is None or data is None:
        raise StoreUnavailableError(f"{why}. No message of these queues is left, which would say where it listens")

    message = decode_message(data, physical_offset=newest)
    address = message.store_host
    client = taken(address, RemoteSettings.of(retry_timeout_s=0.0).remoting())
    try:
        _check_log(client, address, message.topic, newest, data)
        tell_progress(partial(_ask, client, address), group, offsets)
    except StoreUnavailableError as error:
        client.drop(address)  # answers to other requests may be on their way
        raise StoreUnavailableError(f"{why}. The newest message was stored at {address}. {error}") from error
    except BrokerError:
        client.drop(address)
        raise
    finally:
        given_back(client)


def _check_log(client: Client, address: str, topic: str, position: int, data: bytes) -> None:
    """Check that a broker has a record at the same place of its log."""
    fields = {"topic": topic, "offset": position}
    shown = client.request(address, codes.VIEW_MESSAGE_BY_ID, fields, accepts=_VIEWED, timeout_s=ANSWER_TIMEOUT_S)
    if shown.body != data:
        raise StoreUnavailableError("Another broker listens there now")


def _newest(view: StoreView, offsets: Mapping[Queue, int]) -> int | None:
    """The highest physical offset of the messages around some offsets."""
    places = []
    for (topic, queue_id), offset in offsets.items():
        units = view.units(topic, queue_id, max(0, offset - 1), offset + 1)
        places += units["physical_offset"][units["size"] > 0].tolist()
    return max(places, default=None)


def _ask(client: Client, address: str, requests: Sequence[Request]) -> None:
    """Send requests, and then wait for their answers."""
    calls = [client.send(address, code, fields) for code, fields in requests]
    for (code, _), answer in zip(requests, [call.answer(ANSWER_TIMEOUT_S) for call in calls], strict=True):
        if answer.code not in (ANSWERS if code == codes.PULL_MESSAGE else {codes.SUCCESS}):
            raise refused(answer)
