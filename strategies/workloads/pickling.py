"""Objects as bytes for another process: cloudpickle, and what refuses to be pickled: modules with torch's
parametrizations, and operators of torch.library."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import pickle
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import IO, Any

import cloudpickle
from torch import nn
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.nn.utils import parametrize


def dumps(objects: Any) -> bytes:
    """Pickles objects; functions and classes of a script too. `load` reads them in another process.

    Raises:
        Exception: whatever an object raises that cannot be pickled.
    """
    with io.BytesIO() as file:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(objects)
        return file.getvalue()


def load(file: IO[bytes]) -> Any:
    """The objects that `dumps` or cloudpickle pickled.

    The globals of a script's functions become a module of this process: `torch.compile` looks them up by the name of
    their module, and in this process `__main__` is another program.

    Raises:
        Exception: whatever an object raises that does not load here.
    """
    return _Unpickler(file).load()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            made = (parametrize.type_before_parametrizations(obj),)
            names = [name for name, _ in obj.get_submodule("parametrizations").named_children()]
            return _new, made, (obj.__dict__, names), None, None, _fill
        if isinstance(obj, CustomOpDef):
            return _reduced(obj)
        return super().reducer_override(obj)


def _reduced(operator: CustomOpDef) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An operator of torch.library: by the module that has it, or, of a script, by its functions."""
    home = sys.modules.get(operator._init_fn.__module__)
    name = next((name for name, one in vars(home).items() if one is operator), None) if home is not None else None
    if home is not None and name is not None and not _is_of_no_module(home.__name__):
        return getattr, (home, name)
    kernels = {device: inspect.unwrap(kernel) for device, kernel in operator._backend_fns.items()}
    more = operator._abstract_fn, operator._backward_fn, operator._setup_context_fn
    return _registered, (operator._qualname, operator._schema, operator._init_fn, kernels, *more)


def _registered(name: str, schema: str, function: Any, kernels: dict[Any, Any], fake: Any, *autograd: Any) -> Any:
    """The operator of this name in this process, which is registered where it was not."""
    if (known := OPDEFS.get(name)) is not None:
        return known
    namespace, _, own_name = name.partition("::")
    operator = CustomOpDef(namespace, own_name, schema, function)
    for device, kernel in kernels.items():
        operator.register_kernel(device)(kernel)
    if fake is not None:
        operator.register_fake(fake)
    if autograd[0] is not None:
        operator.register_autograd(autograd[0], setup_context=autograd[1])
    return operator


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._modules: dict[int, tuple[dict[str, Any], ModuleType]] = {}  # by the id of the pickled globals

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is cloudpickle.cloudpickle._make_function:
            return functools.partial(_make_in_module, self._modules, found)
        return (
            functools.partial(_fill_function, found) if found is cloudpickle.cloudpickle._function_setstate else found
        )


def _make_in_module(
    modules: dict[int, tuple[dict[str, Any], ModuleType]],
    make: Callable[..., FunctionType],
    code: Any,
    script_globals: dict[str, Any],
    *rest: Any,
) -> FunctionType:
    name = script_globals.get("__name__")
    if id(script_globals) not in modules and _is_of_no_module(name):
        module = ModuleType(f"{_SCRIPT}{next(_numbers)}")
        vars(module).update({name: value for name, value in script_globals.items() if name != "__name__"})
        sys.modules[module.__name__] = module
        modules[id(script_globals)] = script_globals, module
    if id(script_globals) in modules:
        script_globals = vars(modules[id(script_globals)][1])
    return make(code, script_globals, *rest)


def _is_of_no_module(name: object) -> bool:
    return name == "__main__" or name not in sys.modules or str(name).startswith(_SCRIPT)


def _fill_function(fill: Callable[..., None], function: FunctionType, state: Any) -> None:
    """Fills a function; where its code names `__name__`, its globals keep the name of the module that they are in."""
    name = function.__globals__.get("__name__")
    fill(function, state)
    if str(name).startswith(_SCRIPT):
        function.__globals__["__name__"] = name


_SCRIPT = "script_of_another_process_"
_numbers = itertools.count()


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _fill(module: nn.Module, state: tuple[dict[str, Any], list[str]]) -> None:
    """Gives a module its attributes, and its class the properties that compute the parametrized tensors.

    torch makes that class as a parametrization is registered, by these two functions; registering again would change
    the values.
    """
    attributes, names = state
    module.__dict__.update(attributes)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
