"""Converts the named shardings of programs that `jax.export` has exported to descriptions for `muster transfer
plan`, and back.

    for sharding in muster.export.shardings(exported).inputs:
        description = sharding.describe(mesh.devices)       # what --source and --destination of the planner take
    struct = muster.export.struct(description)              # a jax.ShapeDtypeStruct with a NamedSharding

Importing this module needs neither JAX nor NumPy. From 0.9.2 on, JAX keeps the names of axes, also in a program
that was serialised.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from muster.errors import SettingsError

__all__ = ["ArraySharding", "ExportedShardings", "shardings", "struct"]

SpecEntry = Union[None, str, tuple[str, ...]]
"""How a dimension is divided: not, along one axis of the mesh, or along several, the first one major."""


@dataclass(frozen=True)
class ArraySharding:
    """An array and its named sharding, without devices."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[tuple[str, int], ...]
    """The axes of the mesh and their sizes, the slowest first."""
    spec: tuple[SpecEntry, ...]
    """How each dimension is divided; dimensions without an entry are not."""

    def describe(self, devices: Any) -> dict[str, Any]:
        """Returns the planner's description of the array upon these devices.

        Args:
            devices: devices of JAX or their ids, in the order of the mesh: along the last axis first. `mesh.devices` is that.

        Raises:
            SettingsError: the devices are not as many as the mesh has places.
        """
        ids = [_device_id(device) for device in _flat(devices)]
        places = self._places()
        if len(ids) != places:
            raise SettingsError(f"the mesh {_axes_text(self.axes)} has {places} place(s), and there are {len(ids)} device(s)")
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "sharding": {
                "mesh": {"axes": [{"name": name, "size": size} for name, size in self.axes], "devices": ids},
                "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in self.spec],
            },
        }

    def _places(self) -> int:
        places = 1
        for _, size in self.axes:
            places *= size
        return places


@dataclass(frozen=True)
class ExportedShardings:
    """The shardings of an exported program, in the order of its flat arguments and results."""

    inputs: tuple[ArraySharding | None, ...]
    """None: the program leaves the sharding of that argument open."""
    outputs: tuple[ArraySharding | None, ...]


def shardings(exported: Any) -> ExportedShardings:
    """Returns the named shardings of the arguments and results of a `jax.export.Exported`.

    Raises:
        SettingsError: the program has no named shardings (it was exported before JAX 0.9.2), or one that no plan can have: an
            unreduced or unconstrained dimension, or a dimension without a fixed size.
    """
    inputs, outputs = (getattr(exported, name, None) for name in ("_in_named_shardings", "_out_named_shardings"))
    # Programs that were exported by an older release have none of their shardings by name.
    if inputs is None or outputs is None or not getattr(exported, "_has_named_shardings", True):
        raise SettingsError(
            "the exported program has no named shardings: export it with JAX 0.9.2 or later, which keeps the names of axes"
        )
    return ExportedShardings(
        _describe_arrays("argument", exported.in_avals, inputs),
        _describe_arrays("result", exported.out_avals, outputs),
    )


def struct(description: Mapping[str, Any], devices: Iterable[Any] | None = None) -> Any:
    """Returns the `jax.ShapeDtypeStruct` that a description of the planner stands for, with a NamedSharding.

    Args:
        description: shape, dtype and sharding, as `ArraySharding.describe()` returns them.
        devices: the devices among which those of the description are found by their ids; by default all of JAX.

    Raises:
        SettingsError: it is no such description, or a device of it does not exist here.
    """
    jax: Any = importlib.import_module("jax")
    numpy: Any = importlib.import_module("numpy")
    try:
        sharding = description["sharding"]
        axes = [(str(axis["name"]), int(axis["size"])) for axis in sharding["mesh"]["axes"]]
        ids = [int(device) for device in sharding["mesh"]["devices"]]
        spec = [tuple(entry) if isinstance(entry, (list, tuple)) else entry for entry in sharding["spec"]]
        shape = tuple(int(size) for size in description["shape"])
        dtype = jax.numpy.dtype(description["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(
            f"this is no description of an array ({error!r}): give shape, dtype and sharding as `muster transfer plan` takes them"
        ) from error
    by_id = {int(device.id): device for device in (jax.devices() if devices is None else devices)}
    missing = [device for device in ids if device not in by_id]
    if missing:
        raise SettingsError(
            f"the description has device(s) {', '.join(map(str, missing[:8]))}, which this program has not: device ids belong to "
            "one run of a job; `muster.export.shardings()` and describe() name those of this one"
        )
    grid = numpy.empty(len(ids), dtype=object)
    grid[:] = [by_id[device] for device in ids]
    try:
        mesh = jax.sharding.Mesh(grid.reshape([size for _, size in axes]), [name for name, _ in axes])
        named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"JAX refuses the sharding of the description: {error}") from error


def _describe_arrays(what: str, avals: Sequence[Any], named: Sequence[Any]) -> tuple[ArraySharding | None, ...]:
    if len(avals) != len(named):
        raise SettingsError(f"the exported program has {len(avals)} {what}(s) but {len(named)} sharding(s)")
    return tuple(
        None if sharding is None else _describe_array(f"{what} {place}", aval, sharding)
        for place, (aval, sharding) in enumerate(zip(avals, named))
    )


def _describe_array(what: str, aval: Any, sharding: Any) -> ArraySharding:
    spec = sharding.spec
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise SettingsError(f"{what} has unreduced parts, which are no data yet: reduce it before the end of the program")
    entries: list[SpecEntry] = []
    for entry in tuple(spec):
        if entry is None or isinstance(entry, str):
            entries.append(entry)
        elif isinstance(entry, (list, tuple)):
            entries.append(tuple(str(axis) for axis in entry))
        else:
            raise SettingsError(f"{what} has an unconstrained dimension: say how it is divided (in_shardings, out_shardings)")
    if not all(isinstance(size, int) for size in aval.shape):
        raise SettingsError(f"{what} has the shape {aval.shape}, with dimensions of no fixed size: export it with fixed ones")
    axes = tuple((str(name), int(size)) for name, size in dict(sharding.mesh.shape).items())
    return ArraySharding(tuple(aval.shape), str(aval.dtype), axes, tuple(entries))


def _flat(devices: Any) -> Iterable[Any]:
    flat: Iterable[Any] = devices.flat if hasattr(devices, "flat") else devices
    return flat


def _device_id(device: Any) -> int:
    return int(getattr(device, "id", device))


def _axes_text(axes: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes) or "of no axes"
