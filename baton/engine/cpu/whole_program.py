"""Makes numba optimise and translate a program once, as a whole.

By itself numba finishes every function, with all that it calls, before it links it into a caller: what lies ten calls
deep is optimised and translated ten times, which takes most of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding
from numba.core import event
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

_PACKAGE = __package__ or ""
_COMPILE_EVENT = "numba:compile"


@contextmanager
def compiled_as_a_whole(progress: Callable[[int, int], None]) -> Iterator[None]:
    """Compiles within the block without finishing functions that others call. They are compiled anew if used later.

    Args:
        progress: called with the number of functions of this package that are compiled, and the number of all.
    """
    compiled = _Compiled(progress)
    context = cpu_target.target_context
    codegen = context.codegen()
    with global_compiler_lock, event.install_listener(_COMPILE_EVENT, compiled):
        codegen._library_class = _Piece
        context.create_cpython_wrapper = _create_nothing
        try:
            yield
        finally:
            del codegen._library_class, context.create_cpython_wrapper
            for dispatcher in compiled.dispatchers:  # Python could call these functions, which have no code
                dispatcher._make_finalizer()()
                dispatcher._reset_overloads()


class _Compiled(event.Listener):  # type: ignore[misc]
    """Collects compiled functions."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self.dispatchers: list[Any] = []
        self._progress = progress
        self._waited_for = _functions()
        self._num_functions = len(self._waited_for)

    def on_start(self, event: Any) -> None:
        pass

    def on_end(self, event: Any) -> None:
        dispatcher = event.data["dispatcher"]
        self.dispatchers.append(dispatcher)
        if dispatcher in self._waited_for:
            self._waited_for.remove(dispatcher)
            self._progress(self._num_functions - len(self._waited_for), self._num_functions)


def _functions() -> set[Any]:
    """All functions of the imported modules of this package that are compiled on their own."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{_PACKAGE}.")]
    functions = {value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
    return {function for function in functions if function.targetoptions.get("inline") != "always"}


class _Piece(JITCodeLibrary):  # type: ignore[misc]
    """The code of a function, which is optimised and translated as a part of the program that calls it."""

    def add_linking_library(self, library: Any) -> None:
        if isinstance(library, _Piece):
            self._linking_libraries.append(library)
        else:
            super().add_linking_library(library)

    def finalize(self) -> None:
        """Finishes a program: links everything below it, optimises, and translates."""
        below: dict[Any, None] = {}
        pending: list[Any] = [self]
        while pending:
            for library in pending.pop()._linking_libraries:
                if library not in below:
                    below[library] = None
                    if isinstance(library, _Piece) and not library._finalized:
                        pending.append(library)
        self._linking_libraries = list(below)
        super().finalize()

    def get_pointer_to_function(self, name: str) -> int:
        """The function's address; 0, without finishing the library, for the wrapper that it does not contain."""
        if not self._finalized and all(function.name != name for function in self._final_module.functions):
            return 0
        return int(super().get_pointer_to_function(name))

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, env_name: str, env: Any) -> None:
        """Does nothing: without Python's wrapper, a function has no environment."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _get_module_for_linking(self) -> Any:
        if self._finalized:
            return super()._get_module_for_linking()
        module = self._final_module.clone()
        for function in module.functions:
            if not function.is_declaration and function.linkage == llvmlite.binding.Linkage.external:
                function.linkage = "linkonce_odr"
        return module


def _create_nothing(*arguments: Any, **options: Any) -> None:
    """Instead of the wrapper through which Python would call a function."""
