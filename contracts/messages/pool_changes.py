"""Operators' changes of the cluster's pools, settings, adapters and weights: the values that routers and the supervisor
send to the controller, and what they are answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import field

from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.message_types import NAME_LENGTH, SOME, Finite, Message, Name, Uint32, Uint64
from twinpool.contracts.sampling_params import AdapterRef

MAX_SETTINGS_BYTES = 256 * 1024
"""The longest change of settings, as JSON."""
NamedWorker = Annotated[WorkerName, NAME_LENGTH]


class AddWorkers(Message, frozen=True, tag="add"):
    """Add workers to a pool."""

    role: Role
    count: Uint32 = 1
    node: Name = ""
    """The one node they are to run on, by host name or Ray node id; empty: any."""
    by_operator: bool = True
    """Whether an operator asks for it, after which the autoscaler leaves the pools alone; the supervisor asks for the
    workers with which a cluster begins."""


class ScalePools(Message, frozen=True, tag="scale"):
    """Resize pools: workers are started or drained as needed."""

    counts: Annotated[Mapping[Role, Uint32], SOME] = field(default_factory=dict)
    empty: bool = False
    """Whether a pool may be left without a worker."""


class RestartWorker(Message, frozen=True, tag="restart"):
    """Have a worker drain, leave and start again, and with it those that it shares its experts with."""

    name: NamedWorker
    keep: Annotated[tuple[Role, ...], SOME] = ()
    """Roles that mustn't be without a worker meanwhile."""


class CordonNode(Message, frozen=True, tag="cordon"):
    """Place no worker on a node any more; those that serve there go on."""

    node: Name


class UncordonNode(Message, frozen=True, tag="uncordon"):
    """Let workers be placed on a node again."""

    node: Name


PoolChange = AddWorkers | ScalePools | RestartWorker | CordonNode | UncordonNode


class DrainWorkers(Message, frozen=True, tag="drain"):
    """Tell a worker to leave, or cordon a node and tell all workers on it."""

    target: Name
    """A worker by its name, or a node by its host name or Ray node id."""
    keep: Annotated[tuple[Role, ...], SOME] = ()
    """Roles that the drain mustn't leave without a worker."""


class UndrainWorkers(Message, frozen=True, tag="undrain"):
    """Take back the drain of a worker or a node; workers that had left are started again."""

    target: Name


class SetRole(Message, frozen=True, tag="role"):
    """Drain a worker, and start it in another role."""

    name: NamedWorker
    role: Role
    empty: bool = False
    """Whether the role that it has may be left without a worker."""


class LoadAdapter(Message, frozen=True, tag="load_adapter"):
    """Serve an adapter under its name, in place of another one of that name where `replace` says so."""

    adapter: AdapterRef
    replace: bool = False


class UnloadAdapter(Message, frozen=True, tag="unload_adapter"):
    """Serve an adapter no more. Requests that have it go on with it."""

    name: Name


class UpdateWeights(Message, frozen=True, tag="update_weights"):
    """Change the cluster's weights to those of a folder, or back to the checkpoint's."""

    path: Name
    """The folder; empty: the checkpoint that the cluster was started with."""
    version: Name = ""
    """By which clients are told of them; empty: the digest of the files, or of the checkpoint."""
    rolling: bool = False
    """Whether workers change one after the other."""
    wait_s: Finite = 0.0
    """As `ServedWeights.wait_s`."""
    onto: Uint32 | None = None
    """The number of the weights of which a part stays in these; None: none does."""


class FlushCaches(Message, frozen=True, tag="flush"):
    """Let nothing that was computed so far be found any more, on any tier."""

    wait_s: Finite = 0.0
    """As `ServedWeights.wait_s`."""


class PauseCluster(Message, frozen=True, tag="pause"):
    """Have workers make no steps and keep what they have, or go on."""

    paused: bool = True


class SleepCluster(Message, frozen=True, tag="sleep"):
    """Put the cluster to sleep, or wake it."""

    level: Uint32
    """As `ServedWeights.asleep`."""
    wait_s: Finite = 0.0
    """As `ServedWeights.wait_s`."""
    demand: bool = False
    """Whether a request asks for the wake, which ends no sleep of an operator."""


ServingChange = UpdateWeights | FlushCaches | PauseCluster | SleepCluster
OperatorChange = PoolChange | DrainWorkers | UndrainWorkers | SetRole | LoadAdapter | UnloadAdapter | ServingChange
"""All changes that one call of the controller takes (`contracts.messages.calls`)."""


class ChangedWorkers(Message, frozen=True):
    """The workers that a change of pools concerns."""

    names: Annotated[tuple[WorkerName, ...], SOME] = ()
    start: frozenset[WorkerName] = frozenset()
    """Those that start, or start again."""
    leave: frozenset[WorkerName] = frozenset()
    """Those that leave for good, by drain or because they don't run."""
    number: Uint32 = 0
    """The latest change of weights that was begun (`ServedWeights.tried`)."""


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
