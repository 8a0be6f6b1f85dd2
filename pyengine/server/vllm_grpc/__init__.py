"""`vllm.grpc.engine.VllmEngine`, through which gateways speak to vLLM; its stubs are PyPI's `smg-grpc-proto`."""

from __future__ import annotations

import importlib.util

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"


def is_available() -> bool:
    """Whether the stubs are installed. Without them the service is not registered, and calls get UNIMPLEMENTED."""
    return importlib.util.find_spec("smg_grpc_proto") is not None
