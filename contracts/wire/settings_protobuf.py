"""Changes of settings and their answers to protobuf and back."""

from __future__ import annotations

from twinpool.contracts.ids import Role
from twinpool.contracts.messages.settings_change import ChangedSetting, SettingsAnswer, SettingsChange
from twinpool.contracts.proto import worker_pb2 as pb


def change_to_proto(change: SettingsChange) -> pb.SettingsChange:
    return pb.SettingsChange(number=change.number, settings=change.settings, dry_run=change.dry_run)


def change_from_proto(m: pb.SettingsChange) -> SettingsChange:
    return SettingsChange(m.settings, m.dry_run, m.number)


def answer_to_proto(answer: SettingsAnswer) -> pb.SettingsAnswer:
    changed = [
        pb.ChangedSetting(key=one.key, before=one.before, after=one.after, roles=one.roles, by=one.by)
        for one in answer.changed
    ]
    digests = {str(role): digest for role, digest in answer.digests.items()}
    return pb.SettingsAnswer(
        number=answer.number,
        refusal=answer.refusal,
        changed=changed,
        digests=digests,
        behind=answer.behind,
        trouble=answer.trouble,
    )


def answer_from_proto(m: pb.SettingsAnswer) -> SettingsAnswer:
    """Read an answer. Raises `ValueError` for a role that there isn't."""
    changed = tuple(
        ChangedSetting(one.key, one.before, one.after, tuple(Role(role) for role in one.roles), one.by)
        for one in m.changed
    )
    digests = {Role(role): digest for role, digest in m.digests.items()}
    return SettingsAnswer(m.number, m.refusal, changed, digests, m.behind, m.trouble)
