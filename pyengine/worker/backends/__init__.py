"""The devices. A backend is chosen by its name; one that cannot run here says why."""

from __future__ import annotations

from pyengine.config import ResolvedDevice
from pyengine.worker.backend import Backend


def create_backend(name: ResolvedDevice, num_threads: int) -> Backend:
    """The backend of device `name`.

    Args:
        name: "cpu", "cuda" or "emulated".
        num_threads: threads of the CPU kernels.

    Raises:
        ConfigError: the extension was not built for this device.
    """
    if name == "cuda":
        from pyengine.worker.backends.cuda import CudaBackend

        return CudaBackend(num_threads)
    if name == "emulated":
        from pyengine.worker.backends.emulated import EmulatedBackend

        return EmulatedBackend(num_threads)
    from pyengine.worker.backends.cpu import CpuBackend

    return CpuBackend(num_threads)
