"""An LLM inference engine: PagedAttention, continuous batching, prefix sharing and preemption, on CPUs and GPUs.

>>> from pyengine import LLM, SamplingParams
>>> llm = LLM()
>>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pyengine.config import EngineArgs as EngineArgs
    from pyengine.errors import ConfigError as ConfigError
    from pyengine.errors import DeadlineExceededError as DeadlineExceededError
    from pyengine.errors import EngineDeadError as EngineDeadError
    from pyengine.errors import InvalidRequestError as InvalidRequestError
    from pyengine.errors import ModelLoadError as ModelLoadError
    from pyengine.errors import NotFoundError as NotFoundError
    from pyengine.errors import OverloadedError as OverloadedError
    from pyengine.errors import PyEngineError as PyEngineError
    from pyengine.errors import RequestCancelledError as RequestCancelledError
    from pyengine.errors import UnavailableError as UnavailableError
    from pyengine.errors import UnsupportedError as UnsupportedError
    from pyengine.llm import LLM as LLM
    from pyengine.outputs import CompletionOutput as CompletionOutput
    from pyengine.outputs import RequestOutput as RequestOutput
    from pyengine.sampling_params import RequestOutputKind as RequestOutputKind
    from pyengine.sampling_params import SamplingParams as SamplingParams

_ERRORS = (
    "ConfigError",
    "DeadlineExceededError",
    "EngineDeadError",
    "InvalidRequestError",
    "ModelLoadError",
    "NotFoundError",
    "OverloadedError",
    "PyEngineError",
    "RequestCancelledError",
    "UnavailableError",
    "UnsupportedError",
)
_HOME = {
    "LLM": "pyengine.llm",
    "SamplingParams": "pyengine.sampling_params",
    "RequestOutputKind": "pyengine.sampling_params",
    "RequestOutput": "pyengine.outputs",
    "CompletionOutput": "pyengine.outputs",
    "EngineArgs": "pyengine.config",
    **dict.fromkeys(_ERRORS, "pyengine.errors"),
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used (PEP 562), so that `import pyengine` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
