"""Objects as bytes for another process: cloudpickle, and the modules that torch's parametrizations refuse to pickle."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils import parametrize


def dumps(objects: Any) -> bytes:
    """Pickles objects; functions and classes of a script too. `pickle.loads` reads them.

    Raises:
        Exception: whatever an object raises that cannot be pickled.
    """
    with io.BytesIO() as file:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(objects)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            made = (parametrize.type_before_parametrizations(obj),)
            names = [name for name, _ in obj.get_submodule("parametrizations").named_children()]
            return _new, made, (obj.__dict__, names), None, None, _fill
        return super().reducer_override(obj)


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
