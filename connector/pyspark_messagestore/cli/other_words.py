"""The words that people know from other tools, and the command here that does the same.

The command answers with the real name, so that scripts and documents have one name for each thing. Where the
command takes only a store, and changes nothing, it runs: there is nothing to guess. `docs/guides/from-kafka.md` and
`docs/guides/from-rocketmq.md` have them as tables.
"""

from __future__ import annotations

from collections.abc import Sequence

OTHER_WORDS = {
    # verbs of kafka-*.sh, and their like
    "list": "topics ROOT",
    "ls": "topics ROOT",
    "describe": "topics ROOT",
    "create": "topic create ROOT TOPIC",
    "alter": "topic alter ROOT TOPIC",
    "delete": "topic delete ROOT TOPIC",
    "produce": "put ROOT TOPIC BODY",
    "send": "put ROOT TOPIC BODY",
    "consume": "tail ROOT TOPIC --follow",
    "read": "get ROOT TOPIC",
    "cat": "get ROOT TOPIC",
    "reset-offsets": "group reset-offset ROOT GROUP --to TIME",
    "topic list": "topics ROOT",
    "topic describe": "topics ROOT",
    "group list": "groups ROOT",
    "group describe": "lag ROOT --group GROUP",
    "help": "-h",
    "version": "--version",
    # mqadmin's commands
    "updatetopic": "topic create ROOT TOPIC",
    "deletetopic": "topic delete ROOT TOPIC",
    "topiclist": "topics ROOT",
    "topicstatus": "offsets ROOT TOPIC",
    "consumerprogress": "groups ROOT",
    "updatesubgroup": "group create ROOT GROUP",
    "resetoffsetbytime": "group reset-offset ROOT GROUP --to TIME",
    "querymsgbykey": "find ROOT --key KEY",
    "querymsgbyuniquekey": "find ROOT --unique-key ID",
    "querymsgbyid": "find ROOT --msg-id ID",
    "querymsgbyoffset": "get ROOT TOPIC QUEUE --offset OFFSET --count 1",
    "printmsg": "get ROOT TOPIC",
    "consumemessage": "tail ROOT TOPIC",
    "sendmessage": "put ROOT TOPIC BODY",
    "brokerstatus": "status ROOT",
    "updatebrokerconfig": "config ROOT set NAME=VALUE",
    "deleteexpiredcommitlog": "gc ROOT --delete",
}


def real_name(words: Sequence[str]) -> tuple[str, str] | None:
    """What somebody has typed, as far as it is a word of another tool, and the command that does the same here."""
    for typed in (" ".join(words[:2]), *words[:1]):
        if typed.lower() in OTHER_WORDS:
            return typed, OTHER_WORDS[typed.lower()]
    return None
