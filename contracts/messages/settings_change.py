"""A change of a running cluster's settings, and what its supervisor answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import field

from twinpool.contracts.ids import Role
from twinpool.contracts.message_types import SOME, Message, Uint32, Uint64

MAX_SETTINGS_BYTES = 256 * 1024
"""The longest change, as JSON."""


class SettingsChange(Message, frozen=True, tag="settings"):
    """Replace the keys that `settings` names; the others stay."""

    settings: str
    """JSON: sections of keys, as in a configuration file."""
    dry_run: bool = False
    """Whether to say what it would do, and change nothing."""
    number: Uint64 = 0
    """By which the answer names it; 0 until the controller has given it one."""


class ChangedSetting(Message, frozen=True):
    """A key whose value changes."""

    key: str
    before: str
    after: str
    roles: Annotated[tuple[Role, ...], SOME] = ()
    """Whose workers take it up when they start; none: it needs no start of theirs."""
    by: str = ""
    """Which services are replaced for it: ``routers``, or ``controllers`` and routers; empty: none."""


class SettingsAnswer(Message, frozen=True):
    """What has become of a change, or would."""

    number: Uint64
    refusal: str = ""
    """Why nothing was changed, in words; empty where it was."""
    changed: Annotated[tuple[ChangedSetting, ...], SOME] = ()
    digests: Mapping[Role, str] = field(default_factory=dict)
    """Digest of the settings that a worker of each role is started with from now on: one that registered with another
    has old ones."""
    behind: Uint32 = 0
    """How many routers and controllers have old settings still; they are replaced one after the other."""
    trouble: str = ""
    """Why some of them aren't replaced, in words; empty where they are, or will be."""
