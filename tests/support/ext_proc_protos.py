"""Envoy's external processing as protobuf itself reads and writes it: the messages and fields that tests use, from
descriptors with the names, numbers and types of Envoy's `.proto` files."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

_TYPES = {"string": 9, "bytes": 12, "bool": 8, "int32": 5}
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption"), "remove_headers": (2, "*string")},
    "FilterMetadataEntry": {"key": (1, "string"), "value": (2, "google.protobuf.Struct")},
    "Metadata": {"filter_metadata": (1, "*FilterMetadataEntry")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "observability_mode": (10, "bool"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {
        "status": (1, "int32"),
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "google.protobuf.Struct"),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int32")},
}
_PACKAGE = "ext_proc_of_tests"


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(name="ext_proc.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append("google/protobuf/struct.proto")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            one, of = message.field.add(name=field, number=number), kind.removeprefix("*")
            one.label = 3 if kind.startswith("*") else 1
            one.type = _TYPES.get(of, 11)  # 11: a message.
            if of not in _TYPES:
                one.type_name = f".{of}" if "." in of else f".{_PACKAGE}.{of}"
    pool.Add(file)
    return pool


_POOL = _pool()


def proto(name: str, **fields: Any) -> Any:
    """A message of this name; of messages in it, a dict of their fields."""
    made = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))()
    for field, value in fields.items():
        if isinstance(value, dict):
            inner = getattr(made, field)
            inner.update(value) if hasattr(inner, "update") else inner.CopyFrom(
                proto(made.DESCRIPTOR.fields_by_name[field].message_type.name, **value)
            )
        elif isinstance(value, list):
            for one in value:
                if isinstance(one, dict):
                    kind = made.DESCRIPTOR.fields_by_name[field].message_type.name
                    getattr(made, field).append(proto(kind, **one))
                else:
                    getattr(made, field).append(one)
        else:
            setattr(made, field, value)
    return made


def parsed(name: str, data: bytes) -> Any:
    """The message of this name that the bytes are."""
    return type(proto(name)).FromString(data)


def header_map(headers: dict[str, str]) -> dict[str, Any]:
    """The fields of a `HeaderMap`, with its values where Envoy puts them."""
    return {"headers": [{"key": name, "raw_value": value.encode()} for name, value in headers.items()]}


def filter_metadata(**spaces: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `Metadata`; a name space's dots are written as ``__``."""
    return {"filter_metadata": [{"key": n.replace("__", "."), "value": v} for n, v in spaces.items()]}
