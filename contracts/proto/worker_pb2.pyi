from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamOpening(_message.Message):
    __slots__ = ("incarnation", "access")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    access: str
    def __init__(self, incarnation: _Optional[int] = ..., access: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "role", "state", "pid", "node", "incarnation", "running", "waiting", "pages_total", "pages_free", "steps", "outgoing", "counters", "stalled_s", "longest_step_s", "last_end", "plane", "kv_events", "kv_replay", "routers", "prompt_tokens", "waits", "ungranted", "counters_left_out")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    OUTGOING_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    LAST_END_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    KV_REPLAY_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    UNGRANTED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    state: str
    pid: int
    node: str
    incarnation: int
    running: int
    waiting: int
    pages_total: int
    pages_free: int
    steps: int
    outgoing: int
    counters: _containers.ScalarMap[str, float]
    stalled_s: float
    longest_step_s: float
    last_end: str
    plane: str
    kv_events: str
    kv_replay: str
    routers: int
    prompt_tokens: int
    waits: str
    ungranted: int
    counters_left_out: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., incarnation: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., steps: _Optional[int] = ..., outgoing: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., stalled_s: _Optional[float] = ..., longest_step_s: _Optional[float] = ..., last_end: _Optional[str] = ..., plane: _Optional[str] = ..., kv_events: _Optional[str] = ..., kv_replay: _Optional[str] = ..., routers: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., waits: _Optional[str] = ..., ungranted: _Optional[int] = ..., counters_left_out: _Optional[bool] = ...) -> None: ...

class CheckReport(_message.Message):
    __slots__ = ("name", "pages", "slots", "leases", "rooms", "violations", "kept_answers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    KEPT_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pages: int
    slots: int
    leases: int
    rooms: int
    violations: _containers.RepeatedScalarFieldContainer[str]
    kept_answers: int
    def __init__(self, name: _Optional[str] = ..., pages: _Optional[int] = ..., slots: _Optional[int] = ..., leases: _Optional[int] = ..., rooms: _Optional[int] = ..., violations: _Optional[_Iterable[str]] = ..., kept_answers: _Optional[int] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("name", "role", "pid", "node", "endpoint", "control", "max_positions", "context", "incarnation", "stream", "node_id", "fingerprint", "settings", "build", "stream_protocol")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    STREAM_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    pid: int
    node: str
    endpoint: str
    control: str
    max_positions: int
    context: int
    incarnation: int
    stream: str
    node_id: str
    fingerprint: Fingerprint
    settings: str
    build: str
    stream_protocol: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., endpoint: _Optional[str] = ..., control: _Optional[str] = ..., max_positions: _Optional[int] = ..., context: _Optional[int] = ..., incarnation: _Optional[int] = ..., stream: _Optional[str] = ..., node_id: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., settings: _Optional[str] = ..., build: _Optional[str] = ..., stream_protocol: _Optional[int] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("protocol", "layout", "numerics", "weights")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    layout: str
    numerics: str
    weights: str
    def __init__(self, protocol: _Optional[int] = ..., layout: _Optional[str] = ..., numerics: _Optional[str] = ..., weights: _Optional[str] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("incarnation", "lease_s", "fenced", "drain", "ended", "stream", "renew_s", "ended_mark", "counters_s")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    RENEW_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_MARK_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_S_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    lease_s: float
    fenced: bool
    drain: bool
    ended: _containers.RepeatedCompositeFieldContainer[EndedWorker]
    stream: str
    renew_s: float
    ended_mark: int
    counters_s: float
    def __init__(self, incarnation: _Optional[int] = ..., lease_s: _Optional[float] = ..., fenced: _Optional[bool] = ..., drain: _Optional[bool] = ..., ended: _Optional[_Iterable[_Union[EndedWorker, _Mapping]]] = ..., stream: _Optional[str] = ..., renew_s: _Optional[float] = ..., ended_mark: _Optional[int] = ..., counters_s: _Optional[float] = ...) -> None: ...

class EndedWorker(_message.Message):
    __slots__ = ("name", "incarnation", "closed_from")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FROM_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    closed_from: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., closed_from: _Optional[int] = ...) -> None: ...

class LeaveAnswer(_message.Message):
    __slots__ = ("goes_on",)
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    goes_on: bool
    def __init__(self, goes_on: _Optional[bool] = ...) -> None: ...

class RoleChange(_message.Message):
    __slots__ = ("name", "role", "empty")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    empty: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., empty: _Optional[bool] = ...) -> None: ...

class DrainTarget(_message.Message):
    __slots__ = ("name", "keep")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    name: str
    keep: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., keep: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerNames(_message.Message):
    __slots__ = ("workers", "start", "leave")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[str]
    start: _containers.RepeatedScalarFieldContainer[str]
    leave: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[str]] = ..., start: _Optional[_Iterable[str]] = ..., leave: _Optional[_Iterable[str]] = ...) -> None: ...

class PoolSize(_message.Message):
    __slots__ = ("role", "count", "node", "operator")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    role: str
    count: int
    node: str
    operator: bool
    def __init__(self, role: _Optional[str] = ..., count: _Optional[int] = ..., node: _Optional[str] = ..., operator: _Optional[bool] = ...) -> None: ...

class PoolSizes(_message.Message):
    __slots__ = ("pools", "empty")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolSize]
    empty: bool
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolSize, _Mapping]]] = ..., empty: _Optional[bool] = ...) -> None: ...

class NodePlace(_message.Message):
    __slots__ = ("node_id", "host")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    host: str
    def __init__(self, node_id: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class EndedProcess(_message.Message):
    __slots__ = ("name", "incarnation", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    reason: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PlacedProcess(_message.Message):
    __slots__ = ("name", "incarnation", "node")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    node: NodePlace
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., node: _Optional[_Union[NodePlace, _Mapping]] = ...) -> None: ...

class Incarnation(_message.Message):
    __slots__ = ("name", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class SupervisorReport(_message.Message):
    __slots__ = ("running", "ended", "placed", "nodes", "settings", "room")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    running: _containers.RepeatedCompositeFieldContainer[Incarnation]
    ended: _containers.RepeatedCompositeFieldContainer[EndedProcess]
    placed: _containers.RepeatedCompositeFieldContainer[PlacedProcess]
    nodes: _containers.RepeatedCompositeFieldContainer[NodePlace]
    settings: _containers.RepeatedCompositeFieldContainer[SettingsAnswer]
    room: ClusterRoom
    def __init__(self, running: _Optional[_Iterable[_Union[Incarnation, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[EndedProcess, _Mapping]]] = ..., placed: _Optional[_Iterable[_Union[PlacedProcess, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[NodePlace, _Mapping]]] = ..., settings: _Optional[_Iterable[_Union[SettingsAnswer, _Mapping]]] = ..., room: _Optional[_Union[ClusterRoom, _Mapping]] = ...) -> None: ...

class ClusterRoom(_message.Message):
    __slots__ = ("nodes", "grows")
    NODES_FIELD_NUMBER: _ClassVar[int]
    GROWS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeRoom]
    grows: bool
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeRoom, _Mapping]]] = ..., grows: _Optional[bool] = ...) -> None: ...

class NodeRoom(_message.Message):
    __slots__ = ("node", "memory", "processes", "starts", "roles", "dealt", "cards", "free")
    NODE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    DEALT_FIELD_NUMBER: _ClassVar[int]
    CARDS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    node: NodePlace
    memory: int
    processes: int
    starts: int
    roles: _containers.RepeatedCompositeFieldContainer[RoleRoom]
    dealt: bool
    cards: _containers.RepeatedScalarFieldContainer[str]
    free: int
    def __init__(self, node: _Optional[_Union[NodePlace, _Mapping]] = ..., memory: _Optional[int] = ..., processes: _Optional[int] = ..., starts: _Optional[int] = ..., roles: _Optional[_Iterable[_Union[RoleRoom, _Mapping]]] = ..., dealt: _Optional[bool] = ..., cards: _Optional[_Iterable[str]] = ..., free: _Optional[int] = ...) -> None: ...

class RoleRoom(_message.Message):
    __slots__ = ("role", "nbytes", "ranks", "planned", "places")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    role: str
    nbytes: int
    ranks: int
    planned: int
    places: int
    def __init__(self, role: _Optional[str] = ..., nbytes: _Optional[int] = ..., ranks: _Optional[int] = ..., planned: _Optional[int] = ..., places: _Optional[int] = ...) -> None: ...

class SupervisorOrders(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedCompositeFieldContainer[SupervisorOrder]
    def __init__(self, orders: _Optional[_Iterable[_Union[SupervisorOrder, _Mapping]]] = ...) -> None: ...

class SupervisorOrder(_message.Message):
    __slots__ = ("start", "kill", "forget", "note", "failed", "settings")
    START_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    start: StartWorker
    kill: KillWorker
    forget: ForgetArenas
    note: str
    failed: EndedProcess
    settings: SettingsChange
    def __init__(self, start: _Optional[_Union[StartWorker, _Mapping]] = ..., kill: _Optional[_Union[KillWorker, _Mapping]] = ..., forget: _Optional[_Union[ForgetArenas, _Mapping]] = ..., note: _Optional[str] = ..., failed: _Optional[_Union[EndedProcess, _Mapping]] = ..., settings: _Optional[_Union[SettingsChange, _Mapping]] = ...) -> None: ...

class SettingsChange(_message.Message):
    __slots__ = ("number", "settings", "dry_run")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    number: int
    settings: str
    dry_run: bool
    def __init__(self, number: _Optional[int] = ..., settings: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ChangedSetting(_message.Message):
    __slots__ = ("key", "before", "after", "roles", "by")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    key: str
    before: str
    after: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    by: str
    def __init__(self, key: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., by: _Optional[str] = ...) -> None: ...

class SettingsAnswer(_message.Message):
    __slots__ = ("number", "refusal", "changed", "digests", "behind", "trouble")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    number: int
    refusal: str
    changed: _containers.RepeatedCompositeFieldContainer[ChangedSetting]
    digests: _containers.ScalarMap[str, str]
    behind: int
    trouble: str
    def __init__(self, number: _Optional[int] = ..., refusal: _Optional[str] = ..., changed: _Optional[_Iterable[_Union[ChangedSetting, _Mapping]]] = ..., digests: _Optional[_Mapping[str, str]] = ..., behind: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...

class StartWorker(_message.Message):
    __slots__ = ("name", "role", "incarnation", "avoid", "only", "successor_of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    incarnation: int
    avoid: _containers.RepeatedScalarFieldContainer[str]
    only: str
    successor_of: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[int] = ..., avoid: _Optional[_Iterable[str]] = ..., only: _Optional[str] = ..., successor_of: _Optional[int] = ...) -> None: ...

class KillWorker(_message.Message):
    __slots__ = ("name", "incarnation", "pid", "node")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    pid: int
    node: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...

class ForgetArenas(_message.Message):
    __slots__ = ("name", "before")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    name: str
    before: int
    def __init__(self, name: _Optional[str] = ..., before: _Optional[int] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ("name", "incarnation", "status", "ended_mark", "closed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MARK_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    status: WorkerStatus
    ended_mark: int
    closed: bool
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., ended_mark: _Optional[int] = ..., closed: _Optional[bool] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("registration", "status", "cordoned")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    status: WorkerStatus
    cordoned: bool
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., cordoned: _Optional[bool] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("version", "workers", "shutting_down", "changes", "statuses", "control_plane", "record_asks")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SHUTTING_DOWN_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PLANE_FIELD_NUMBER: _ClassVar[int]
    RECORD_ASKS_FIELD_NUMBER: _ClassVar[int]
    version: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    shutting_down: bool
    changes: bool
    statuses: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    control_plane: ControlPlane
    record_asks: _containers.RepeatedCompositeFieldContainer[RecordAsk]
    def __init__(self, version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ..., shutting_down: _Optional[bool] = ..., changes: _Optional[bool] = ..., statuses: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., control_plane: _Optional[_Union[ControlPlane, _Mapping]] = ..., record_asks: _Optional[_Iterable[_Union[RecordAsk, _Mapping]]] = ...) -> None: ...

class RecordAsk(_message.Message):
    __slots__ = ("number", "request_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ControlPlane(_message.Message):
    __slots__ = ("leader", "term", "standbys")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    leader: str
    term: int
    standbys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, leader: _Optional[str] = ..., term: _Optional[int] = ..., standbys: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("changes", "records")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    changes: bool
    records: bool
    def __init__(self, changes: _Optional[bool] = ..., records: _Optional[bool] = ...) -> None: ...

class QuotaAmounts(_message.Message):
    __slots__ = ("requests", "tokens", "concurrent")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    requests: float
    tokens: float
    concurrent: int
    def __init__(self, requests: _Optional[float] = ..., tokens: _Optional[float] = ..., concurrent: _Optional[int] = ...) -> None: ...

class QuotaClaim(_message.Message):
    __slots__ = ("tenant", "limits", "used", "wanted")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limits: QuotaAmounts
    used: QuotaAmounts
    wanted: QuotaAmounts
    def __init__(self, tenant: _Optional[str] = ..., limits: _Optional[_Union[QuotaAmounts, _Mapping]] = ..., used: _Optional[_Union[QuotaAmounts, _Mapping]] = ..., wanted: _Optional[_Union[QuotaAmounts, _Mapping]] = ...) -> None: ...

class QuotaClaims(_message.Message):
    __slots__ = ("router", "claims")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    router: str
    claims: _containers.RepeatedCompositeFieldContainer[QuotaClaim]
    def __init__(self, router: _Optional[str] = ..., claims: _Optional[_Iterable[_Union[QuotaClaim, _Mapping]]] = ...) -> None: ...

class QuotaSlice(_message.Message):
    __slots__ = ("tenant", "granted", "left")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    granted: QuotaAmounts
    left: QuotaAmounts
    def __init__(self, tenant: _Optional[str] = ..., granted: _Optional[_Union[QuotaAmounts, _Mapping]] = ..., left: _Optional[_Union[QuotaAmounts, _Mapping]] = ...) -> None: ...

class QuotaSlices(_message.Message):
    __slots__ = ("slices",)
    SLICES_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedCompositeFieldContainer[QuotaSlice]
    def __init__(self, slices: _Optional[_Iterable[_Union[QuotaSlice, _Mapping]]] = ...) -> None: ...

class LatencyReport(_message.Message):
    __slots__ = ("router", "requests", "first_tokens", "first_late", "gaps", "gaps_late")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LATE_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    GAPS_LATE_FIELD_NUMBER: _ClassVar[int]
    router: str
    requests: int
    first_tokens: int
    first_late: int
    gaps: int
    gaps_late: int
    def __init__(self, router: _Optional[str] = ..., requests: _Optional[int] = ..., first_tokens: _Optional[int] = ..., first_late: _Optional[int] = ..., gaps: _Optional[int] = ..., gaps_late: _Optional[int] = ...) -> None: ...

class PoolSizing(_message.Message):
    __slots__ = ("role", "ready", "wanted", "least", "most", "need", "why")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    role: str
    ready: int
    wanted: int
    least: int
    most: int
    need: float
    why: str
    def __init__(self, role: _Optional[str] = ..., ready: _Optional[int] = ..., wanted: _Optional[int] = ..., least: _Optional[int] = ..., most: _Optional[int] = ..., need: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class SizingDecision(_message.Message):
    __slots__ = ("ago_s", "text")
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ago_s: float
    text: str
    def __init__(self, ago_s: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class AutoscalerView(_message.Message):
    __slots__ = ("pools", "decisions", "held_s", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    POOLS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolSizing]
    decisions: _containers.RepeatedCompositeFieldContainer[SizingDecision]
    held_s: float
    counters: _containers.ScalarMap[str, int]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolSizing, _Mapping]]] = ..., decisions: _Optional[_Iterable[_Union[SizingDecision, _Mapping]]] = ..., held_s: _Optional[float] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RecordSpan(_message.Message):
    __slots__ = ("name", "start_s", "end_s", "worker", "detail", "hidden")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_s: float
    end_s: float
    worker: str
    detail: str
    hidden: bool
    def __init__(self, name: _Optional[str] = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ..., worker: _Optional[str] = ..., detail: _Optional[str] = ..., hidden: _Optional[bool] = ...) -> None: ...

class RecordEvent(_message.Message):
    __slots__ = ("at_s", "kind", "worker", "text")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    kind: str
    worker: str
    text: str
    def __init__(self, at_s: _Optional[float] = ..., kind: _Optional[str] = ..., worker: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class WorkerCandidate(_message.Message):
    __slots__ = ("worker", "cost", "held", "load")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    worker: str
    cost: float
    held: int
    load: int
    def __init__(self, worker: _Optional[str] = ..., cost: _Optional[float] = ..., held: _Optional[int] = ..., load: _Optional[int] = ...) -> None: ...

class RefusedWorkers(_message.Message):
    __slots__ = ("reason", "count", "workers")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ..., workers: _Optional[_Iterable[str]] = ...) -> None: ...

class PlacementChoice(_message.Message):
    __slots__ = ("at_s", "attempt", "role", "chosen", "unit", "candidates", "others", "refused", "why")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    attempt: int
    role: str
    chosen: str
    unit: str
    candidates: _containers.RepeatedCompositeFieldContainer[WorkerCandidate]
    others: int
    refused: _containers.RepeatedCompositeFieldContainer[RefusedWorkers]
    why: str
    def __init__(self, at_s: _Optional[float] = ..., attempt: _Optional[int] = ..., role: _Optional[str] = ..., chosen: _Optional[str] = ..., unit: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[WorkerCandidate, _Mapping]]] = ..., others: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[RefusedWorkers, _Mapping]]] = ..., why: _Optional[str] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("request_id", "answer_id", "client_id", "router", "model", "tenant", "arrived", "total_s", "first_token_s", "outcome", "message", "prompt_tokens", "cached_tokens", "held_tokens", "generated", "transfer_bytes", "attempts", "migrations", "retractions", "uncertainty_s", "trace_id", "spans", "events", "choices", "left_out", "refused_status", "numbers")
    class CachedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    RETRACTIONS_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_S_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_STATUS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    answer_id: str
    client_id: str
    router: str
    model: str
    tenant: str
    arrived: float
    total_s: float
    first_token_s: float
    outcome: str
    message: str
    prompt_tokens: int
    cached_tokens: _containers.ScalarMap[str, int]
    held_tokens: int
    generated: int
    transfer_bytes: int
    attempts: int
    migrations: int
    retractions: int
    uncertainty_s: float
    trace_id: str
    spans: _containers.RepeatedCompositeFieldContainer[RecordSpan]
    events: _containers.RepeatedCompositeFieldContainer[RecordEvent]
    choices: _containers.RepeatedCompositeFieldContainer[PlacementChoice]
    left_out: int
    refused_status: int
    numbers: _containers.ScalarMap[str, float]
    def __init__(self, request_id: _Optional[str] = ..., answer_id: _Optional[str] = ..., client_id: _Optional[str] = ..., router: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., arrived: _Optional[float] = ..., total_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., outcome: _Optional[str] = ..., message: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[_Mapping[str, int]] = ..., held_tokens: _Optional[int] = ..., generated: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., attempts: _Optional[int] = ..., migrations: _Optional[int] = ..., retractions: _Optional[int] = ..., uncertainty_s: _Optional[float] = ..., trace_id: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[RecordSpan, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[RecordEvent, _Mapping]]] = ..., choices: _Optional[_Iterable[_Union[PlacementChoice, _Mapping]]] = ..., left_out: _Optional[int] = ..., refused_status: _Optional[int] = ..., numbers: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RecordAnswer(_message.Message):
    __slots__ = ("number", "records")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    records: _containers.RepeatedCompositeFieldContainer[RequestRecord]
    def __init__(self, number: _Optional[int] = ..., records: _Optional[_Iterable[_Union[RequestRecord, _Mapping]]] = ...) -> None: ...

class RecordReport(_message.Message):
    __slots__ = ("router", "records", "answers")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    router: str
    records: _containers.RepeatedCompositeFieldContainer[RequestRecord]
    answers: _containers.RepeatedCompositeFieldContainer[RecordAnswer]
    def __init__(self, router: _Optional[str] = ..., records: _Optional[_Iterable[_Union[RequestRecord, _Mapping]]] = ..., answers: _Optional[_Iterable[_Union[RecordAnswer, _Mapping]]] = ...) -> None: ...

class RecordQuery(_message.Message):
    __slots__ = ("request_id", "recent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    recent: int
    def __init__(self, request_id: _Optional[str] = ..., recent: _Optional[int] = ...) -> None: ...

class FoundRecords(_message.Message):
    __slots__ = ("records", "kept_s", "asked", "answered")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_S_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[RequestRecord]
    kept_s: float
    asked: int
    answered: int
    def __init__(self, records: _Optional[_Iterable[_Union[RequestRecord, _Mapping]]] = ..., kept_s: _Optional[float] = ..., asked: _Optional[int] = ..., answered: _Optional[int] = ...) -> None: ...

class DashboardFrame(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class RouterReport(_message.Message):
    __slots__ = ("router", "node", "pid", "build", "model", "in_flight", "waiting", "counters", "first_tokens", "gaps", "open_breakers", "viewers", "name", "address", "settings", "kept", "output_tokens", "cpu_s", "tokens_per_s", "ttft_slo_s")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    OPEN_BREAKERS_FIELD_NUMBER: _ClassVar[int]
    VIEWERS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    router: str
    node: str
    pid: int
    build: str
    model: str
    in_flight: int
    waiting: int
    counters: _containers.ScalarMap[str, int]
    first_tokens: _containers.RepeatedScalarFieldContainer[int]
    gaps: _containers.RepeatedScalarFieldContainer[int]
    open_breakers: _containers.RepeatedScalarFieldContainer[str]
    viewers: int
    name: str
    address: str
    settings: str
    kept: bool
    output_tokens: _containers.RepeatedScalarFieldContainer[int]
    cpu_s: float
    tokens_per_s: float
    ttft_slo_s: float
    def __init__(self, router: _Optional[str] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., build: _Optional[str] = ..., model: _Optional[str] = ..., in_flight: _Optional[int] = ..., waiting: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., first_tokens: _Optional[_Iterable[int]] = ..., gaps: _Optional[_Iterable[int]] = ..., open_breakers: _Optional[_Iterable[str]] = ..., viewers: _Optional[int] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., settings: _Optional[str] = ..., kept: _Optional[bool] = ..., output_tokens: _Optional[_Iterable[int]] = ..., cpu_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., ttft_slo_s: _Optional[float] = ...) -> None: ...

class RouterReports(_message.Message):
    __slots__ = ("routers",)
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    routers: _containers.RepeatedCompositeFieldContainer[RouterReport]
    def __init__(self, routers: _Optional[_Iterable[_Union[RouterReport, _Mapping]]] = ...) -> None: ...

class RouterReportAnswer(_message.Message):
    __slots__ = ("next_s",)
    NEXT_S_FIELD_NUMBER: _ClassVar[int]
    next_s: float
    def __init__(self, next_s: _Optional[float] = ...) -> None: ...
