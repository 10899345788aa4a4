"""From CUDA C++ to a kernel that can be launched: NVRTC compiles, the driver loads, nothing else is needed."""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one block may have on sm_90."""


class CudaError(RuntimeError):
    """A call to the CUDA driver or compiler failed."""


def _bindings(name: str) -> Any:
    """`cuda.bindings.NAME`, or what to install."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise CudaError(f"the kernels need cuda-bindings ({error}). Run pip install 'pagelocks[gpu]'.") from error


def _call(function: Any, *args: Any) -> Any:
    """Call into cuda.bindings; raise for an error, return what is left of the tuple."""
    error, *rest = function(*args)
    if int(error) != 0:
        raise CudaError(f"{function.__name__}: {error!s}")
    return rest[0] if len(rest) == 1 else rest


HEADERS = {
    "score": ("score.cuh",),
    "select": ("select.cuh",),
    "attend": ("page.cuh",),
    "select_attend": ("select.cuh", "page.cuh"),
}
"""What a kernel file needs ahead of it, beside common.cuh."""


def source_of(name: str, defines: Mapping[str, int]) -> str:
    """The text that is compiled for kernel file `name`: numbers, what is shared, the kernel."""
    folder = files(__package__) / "cuda"
    lines = [f"#define {key} {value}\n" for key, value in defines.items()]
    parts = ("common.cuh", *HEADERS.get(name, ()), f"{name}.cu")
    return "".join(lines) + "".join((folder / part).read_text() for part in parts)


def compile_kernel(name: str, defines: Mapping[str, int], arch: str = "sm_90a") -> bytes:
    """Machine code of kernel file `name` for `arch`; needs no GPU.

    Raises
    ------
    CudaError
        With the compiler's messages.
    """
    return _compile(name, tuple(defines.items()), arch)


def options_for(arch: str) -> list[bytes]:
    """What NVRTC is told."""
    return [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"-default-device"]


@lru_cache(maxsize=64)
def _compile(name: str, defines: tuple[tuple[str, int], ...], arch: str) -> bytes:
    nvrtc = _bindings("nvrtc")
    source = source_of(name, dict(defines))
    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), f"{name}.cu".encode(), 0, [], [])
    options = options_for(arch)
    try:
        _call(nvrtc.nvrtcCompileProgram, program, len(options), options)
    except CudaError as error:
        log = b" " * _call(nvrtc.nvrtcGetProgramLogSize, program)
        _call(nvrtc.nvrtcGetProgramLog, program, log)
        raise CudaError(f"{name}.cu does not compile for {arch}: {error}\n{log.decode(errors='replace')}") from None
    code: bytes = b" " * _call(nvrtc.nvrtcGetCUBINSize, program)
    _call(nvrtc.nvrtcGetCUBIN, program, code)
    return code


class Kernel:
    """A compiled kernel with one by-value struct as its parameter.

    Parameters
    ----------
    name : str
        The file; `function` is what is called in it.
    defines : mapping
        Numbers that the file needs.
    parameters : str
        The struct's fields in the notation of Python's `struct`, native alignment.
    threads, shared : int
        Threads and bytes of dynamic shared memory of a block.
    cluster : int
        Blocks of a cluster.

    Attributes
    ----------
    at_once : int
        Clusters of more than one block that the device holds at a time: a cluster needs its processors in one GPC.
    """

    def __init__(
        self,
        name: str,
        function: str,
        defines: Mapping[str, int],
        parameters: str,
        threads: int,
        shared: int = 0,
        cluster: int = 1,
    ) -> None:
        import torch

        driver = _bindings("driver")
        torch.empty(1, device="cuda")  # the driver calls below need PyTorch's context
        self._driver = driver
        major, minor = torch.cuda.get_device_capability()
        code = compile_kernel(name, defines, f"sm_{major}{minor}a")
        self._module = _call(driver.cuModuleLoadData, code)
        self._function = _call(driver.cuModuleGetFunction, self._module, function.encode())
        attribute = driver.CUfunction_attribute
        if shared > 48 * 1024:
            key = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call(driver.cuFuncSetAttribute, self._function, key, shared)
        if cluster > 8:
            key = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _call(driver.cuFuncSetAttribute, self._function, key, 1)
        self._struct = struct.Struct(f"@{parameters}")
        self._buffer = ctypes.create_string_buffer(self._struct.size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._address = ctypes.addressof(self._pointers)
        config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        ids = driver.CUlaunchAttributeID
        # The kernel may start while the one ahead of it ends; it waits where it must.
        overlap = driver.CUlaunchAttribute()
        overlap.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes = [overlap]
        if cluster > 1:
            dimension = driver.CUlaunchAttribute()
            dimension.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension.value.clusterDim.x = cluster
            dimension.value.clusterDim.y = dimension.value.clusterDim.z = 1
            attributes.append(dimension)
        config.attrs, config.numAttrs = attributes, len(attributes)
        self._config = config
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        self.at_once = int(_call(driver.cuOccupancyMaxActiveClusters, self._function, config)) if cluster > 1 else 0

    def launch(self, stream: int, grid: tuple[int, int], *values: Any) -> None:
        """Launch on the stream with this handle; `values` are the struct's fields, tensors as their addresses."""
        self._struct.pack_into(self._buffer, 0, *values)
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], 1
        config.hStream = stream
        _call(self._driver.cuLaunchKernelEx, config, self._function, self._address, 0)
