"""The settings that the sessions of one process share: which ones may differ from call to call, and which may not.

    a session is open       the next caller asks for the same settings, or for none
    no session is open      each commit brings its own; the store is closed first if more than `LOOKED_AT` differs
    the store's own         count where the caller gives none (`stored_with` changes them)

ARCHITECTURE.md says why: "Sessions of one process share their settings".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from messagestore.errors import ConfigError
from messagestore.format.config import ASYNC_FLUSH, StoreConfig, java_key, settings
from messagestore.log.store_files import FIXED

_log = logging.getLogger(__name__)
CHANGEABLE = ("max_message_size", "max_msgs_num_batch", "put_in_flight_size", "sync_flush_timeout")
"""The settings of an open store that `MessageStore.alter_config` changes."""
LOOKED_AT = frozenset(
    {
        *CHANGEABLE,
        "flush_disk_type",
        "lock_timeout",
        "attach_timeout",
        "proven_tail_size",
        "fail_on_unproven",
        "read_up_to",
    }
)
"""The settings that say how one call behaves: another caller's do not change what an earlier one has been promised."""
_LEVELS = "message_delay_level"
_WARNED_OF = frozenset({"flush_disk_type", "max_message_size"})
_warned: set[tuple[str, str]] = set()
"""Roots, and settings that this process gives otherwise than the store has them, of which it has warned."""


def differing_settings(config: StoreConfig, *open_with: StoreConfig) -> list[str]:
    """The fields that a configuration has otherwise than all known ones, apart from those that are fixed in a store.

    Of the delay levels, those that the store's files have now count, which are known last, if the configuration chooses
    any.
    """
    names = [setting.name for setting in settings() if setting.name not in FIXED] + ["broker_settings"]
    differing = [name for name in names if all(getattr(config, name) != getattr(other, name) for other in open_with)]
    if _LEVELS in differing:
        differing.remove(_LEVELS)
    if config.is_given(_LEVELS) and config.delays_ms != open_with[-1].delays_ms:
        differing.append(_LEVELS)
    return differing


def other_settings(root: str, differing: list[str], open_with: StoreConfig, wanted: StoreConfig) -> ConfigError:
    """The error for a caller whose settings are not those of the sessions that are open."""
    differences = ", ".join(
        f"{java_key(name)}: found {getattr(wanted, name)!r}, and the open session has {getattr(open_with, name)!r}"
        for name in differing
    )
    return ConfigError(
        f"{root}: this process has the store open with other settings, which all its sessions share. {differences}. "
        f"Give the same settings, or none, or close the other session first",
        key=java_key(differing[0]),
        value=getattr(wanted, differing[0]),
    )


def stored_with(before: StoreConfig, changes: Mapping[str, object]) -> StoreConfig:
    """The settings that live with a store, after changes; None takes a setting away.

    Raises
    ------
    ConfigError
        A key is no setting, or one that is fixed in a store, or a value is not allowed.
    """
    StoreConfig.check_names(changes)
    names = {java_key(setting.name).lower(): setting.name for setting in settings()}
    for name in FIXED:
        if java_key(name).lower() in {key.lower() for key in changes}:
            raise ConfigError(
                f"{java_key(name)}: found a setting that is fixed when a store is made, and that no store changes "
                "later. Make a new store with it, and copy the messages there",
                key=java_key(name),
            )

    kept: dict[str, object] = dict(before.to_mapping())
    for key, value in changes.items():
        kept.pop(java_key(names[key.lower()]), None)
        if value is not None:
            kept[java_key(names[key.lower()])] = value
    config = StoreConfig.from_mapping(kept)
    if config.transient_store_pool_enable and config.flush_disk_type != ASYNC_FLUSH:
        raise ConfigError(
            "transientStorePoolEnable: found true with flushDiskType=SYNC_FLUSH; allowed is true with ASYNC_FLUSH "
            "only. Set both, or neither",
            key="transientStorePoolEnable",
            value=True,
        )
    return config


def warn_of_differences(root: str, config: StoreConfig, stored: StoreConfig) -> None:
    """Warn, once a process, of settings that the caller gives otherwise than the store has them."""
    for name in sorted(stored.given):
        if name in LOOKED_AT and name not in _WARNED_OF:
            continue
        asked, of_store = getattr(config, name), getattr(stored, name)
        if not config.is_callers(name) or asked == of_store or (root, name) in _warned:
            continue
        _warned.add((root, name))
        _log.warning(
            "%s: %s: this program gives %r, which counts for it; the store's own setting is %r. To use the store's, "
            "give none; to change it for all, run `messagestore config ROOT set %s=%s`",
            root,
            java_key(name),
            asked,
            of_store,
            java_key(name),
            asked,
        )
