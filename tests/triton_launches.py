"""Compiles kernels as they would be launched, for GPUs that this machine lacks."""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled launch.

    Attributes:
        ptxas: report of the assembler with ``-v``.
        shared: bytes of shared memory of the launch.
        tensor_memory: columns of tensor memory of the launch (compute capability 10.0).
        constants: the launch's compile-time arguments by name, and ``num_warps``.
    """

    kernel: JITFunction[Any]
    ptx: str
    ttgir: str
    ptxas: str
    shared: int
    tensor_memory: int
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


class Launches:
    """Stands in for a kernel and records its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel: JITFunction[Any] = kernel
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))

    def compile(self, capability: int, **changes: Any) -> Compiled:
        """Compiles the last launch with Triton's own specialization of its arguments, without any cache.

        Args:
            capability: compute capability times ten.
            changes: compile-time arguments and options that differ from the launch's.
        """
        args, kwargs = self.calls[-1]
        kwargs = {**kwargs, **changes}
        target = GPUTarget("cuda", capability, 32)
        backend = make_backend(target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        parsed, signature, constants, attributes = self.kernel._pack_args(
            backend, kwargs, bound, specialization, options
        )
        source = ASTSource(self.kernel, signature, constants, attributes)
        log = io.StringIO()
        with (
            tempfile.TemporaryDirectory() as folder,
            knobs.cache.scope(),
            knobs.nvidia.scope(),
            redirect_stdout(log),
        ):
            knobs.cache.dir = folder
            knobs.nvidia.dump_ptxas_log = True
            compiled = compile(source, target=target, options=parsed.__dict__)
        metadata = compiled.metadata
        return Compiled(
            kernel=self.kernel,
            ptx=compiled.asm["ptx"],
            ttgir=compiled.asm["ttgir"],
            ptxas=log.getvalue(),
            shared=metadata.shared,
            tensor_memory=getattr(metadata, "tmem_size", 0) or 0,
            constants={"num_warps": metadata.num_warps, **kwargs},
        )
