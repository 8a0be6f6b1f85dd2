"""What every gRPC service here shares: how it is registered, how messages are parsed, and the frame around a call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from pyengine.errors import InvalidRequestError, UnsupportedError
from pyengine.server.frontend import Frontend
from pyengine.server.status import errors_as_status


class CallFrame:
    """Around the handlers of one service.

    Args:
        frontend: that every call goes through.
        api_fields: the engine's names of fields, where clients of this service spell them otherwise.
    """

    def __init__(self, frontend: Frontend, api_fields: Mapping[str, str]) -> None:
        self._frontend = frontend
        self._api_fields = api_fields

    @asynccontextmanager
    async def __call__(
        self, request: Any, context: grpc.aio.ServicerContext, method: str, *, while_draining: bool = False
    ) -> AsyncIterator[None]:
        """Around everything that a call does: it ends with the right status, its fields named as the client spelled them."""
        async with errors_as_status(context, method):
            with self._frontend.call(while_draining=while_draining):
                if isinstance(request, InvalidRequestError):  # see `parser`
                    raise request
                try:
                    yield
                except (InvalidRequestError, UnsupportedError) as error:
                    raise type(error)(self._api_fields.get(error.field, error.field), error.message) from error


def add_service(service: ServiceDescriptor, servicer: object, server: grpc.aio.Server) -> None:
    """Register a service; `servicer` has a handler of each method's name."""
    handlers = {}
    for method in service.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=parser(GetMessageClass(method.input_type)),
            response_serializer=_serialise,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def parser(message_type: type[Message]) -> Callable[[bytes], Message | InvalidRequestError]:
    """A request deserialiser.

    gRPC answers INTERNAL if a deserialiser raises, though it is the client who is wrong; so the error is returned, and the
    frame of the call raises it.
    """

    def parse(data: bytes) -> Message | InvalidRequestError:
        message = message_type()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return InvalidRequestError("request", f"is not a valid {message_type.DESCRIPTOR.full_name}")
        return message

    return parse


def _serialise(message: Message) -> bytes:
    return message.SerializeToString()
