from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_DONE: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]
    OUTCOME_UNSUPPORTED: _ClassVar[Outcome]
    OUTCOME_UNREACHABLE: _ClassVar[Outcome]
    OUTCOME_TIMED_OUT: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_DONE: Outcome
OUTCOME_REFUSED: Outcome
OUTCOME_UNSUPPORTED: Outcome
OUTCOME_UNREACHABLE: Outcome
OUTCOME_TIMED_OUT: Outcome
OUTCOME_FAILED: Outcome

class FlushCacheRequest(_message.Message):
    __slots__ = ("timeout_s", "hold")
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    hold: bool
    def __init__(self, timeout_s: _Optional[float] = ..., hold: _Optional[bool] = ...) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("success", "message", "workers_flushed", "total_workers", "total_http_workers", "total_grpc_workers", "workers")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FLUSHED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_HTTP_WORKERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_GRPC_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    message: str
    workers_flushed: int
    total_workers: int
    total_http_workers: int
    total_grpc_workers: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerResult]
    def __init__(self, success: _Optional[bool] = ..., message: _Optional[str] = ..., workers_flushed: _Optional[int] = ..., total_workers: _Optional[int] = ..., total_http_workers: _Optional[int] = ..., total_grpc_workers: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerResult, _Mapping]]] = ...) -> None: ...

class WorkerResult(_message.Message):
    __slots__ = ("url", "kind", "outcome", "message", "seconds", "ranks")
    URL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    url: str
    kind: str
    outcome: Outcome
    message: str
    seconds: float
    ranks: _containers.RepeatedCompositeFieldContainer[RankResult]
    def __init__(self, url: _Optional[str] = ..., kind: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., message: _Optional[str] = ..., seconds: _Optional[float] = ..., ranks: _Optional[_Iterable[_Union[RankResult, _Mapping]]] = ...) -> None: ...

class RankResult(_message.Message):
    __slots__ = ("rank", "outcome", "message")
    RANK_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    outcome: Outcome
    message: str
    def __init__(self, rank: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., message: _Optional[str] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("id", "url", "kind", "models", "state", "reason", "running", "waiting", "outstanding", "breaker", "kv")
    ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    id: str
    url: str
    kind: str
    models: _containers.RepeatedScalarFieldContainer[str]
    state: str
    reason: str
    running: int
    waiting: int
    outstanding: int
    breaker: str
    kv: KvState
    def __init__(self, id: _Optional[str] = ..., url: _Optional[str] = ..., kind: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., outstanding: _Optional[int] = ..., breaker: _Optional[str] = ..., kv: _Optional[_Union[KvState, _Mapping]] = ...) -> None: ...

class KvState(_message.Message):
    __slots__ = ("state", "blocks", "epoch")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    state: str
    blocks: int
    epoch: str
    def __init__(self, state: _Optional[str] = ..., blocks: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...
