"""load_bundle(): a network of a bundle as an object that runs, on devices and by a policy that are chosen now."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from autosplit.arguments import checked
from autosplit.backends.base import named_backend
from autosplit.bundling.bundlecheck import filled
from autosplit.bundling.bundlepart import BundlePart
from autosplit.bundling.driver import Fitter
from autosplit.bundling.manifest import WEIGHTS, Manifest, Network, Part, check_files
from autosplit.bundling.packing import unpacked
from autosplit.bundling.partchain import as_one_stage
from autosplit.closing import Closing
from autosplit.devices.discovering import PACKAGES, Devices, as_machine, cpu_name, discover
from autosplit.devices.limits import affinity
from autosplit.errors import BundleError, MissingExtraError, PlanError, UsageError, raise_faults
from autosplit.running.engine import Engine
from autosplit.running.pipeline import InProcess, Pipeline
from autosplit.running.stage import StagePlacement, Variant
from autosplit.running.wiring import faults_of
from autosplit.values.machine import Device, parse_device
from autosplit.versions import version_of

Policy = Literal["serial", "threads", "processes"]


class OpenBundle(Closing):
    """A network of a bundle that runs; open until ``close``, best used in a ``with`` block.

    ``engine`` takes requests as a Pipeline does: ``run``, ``run_many``, ``stream`` and ``submit`` of flat tensors, which have the
    sizes of one of the variants. Its answers are tuples of tensors in the order of ``outputs``.
    """

    def __init__(self, manifest: Manifest, name: str, engine: Engine, opened: ExitStack) -> None:
        self.manifest = manifest
        self.name = name
        self.engine = engine
        self._opened = opened
        self._fit = Fitter(asdict(self.network), _full)

    @property
    def network(self) -> Network:
        """The row of the manifest."""
        return self.manifest.networks[self.name]

    def __call__(self, *args: torch.Tensor, **named: torch.Tensor) -> Any:
        """The outputs of the model for one request, with tensors in order or by name; objects with fields are dicts."""
        if args and named:
            raise UsageError(f"give the inputs in order or by name, not both; they are {', '.join(self.network.inputs)}")
        answer = self.run(named or args)
        return filled(self.network.answer, dict(zip(self.network.outputs, answer, strict=True)))

    def run(self, inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """One request, start to end: tensors in the order of the network's inputs, or by name.

        Of several sizes, it may have any within the ranges: it runs padded on the smallest variant that holds it. Masks that are
        left out are filled in. Raises: UsageError: the tensors do not fit, or a size is outside its range.
        """
        try:
            request = self._fit(inputs)
        except ValueError as failure:
            raise UsageError(str(failure)) from None
        answer = self.engine.run([request.values[name] for name in self.network.inputs])
        made = zip(self.engine.wiring.outputs, answer, strict=True)
        return tuple(self._fit.cut(name, value, request.sizes) for name, value in made)

    def close(self) -> None:
        """End the engine and remove the files that were unpacked."""
        self._opened.close()

    def __repr__(self) -> str:
        return f"OpenBundle({self.name!r}, {len(self.network.parts)} parts)"


def _full(shape: Sequence[int], value: int, dtype: str) -> torch.Tensor:
    return torch.full(tuple(shape), value, dtype=getattr(torch, dtype))


@checked
def load_bundle(
    path: str | Path,
    *,
    network: str | None = None,
    policy: Policy = "serial",
    devices: Devices | None = None,
    trust: bool = False,
    verify: bool = True,
    cuts: bool = False,
) -> OpenBundle:
    """Open a network of a bundle. Nothing is traced, exported or compiled, and no code of the model's maker runs.

    Args:
        path: the folder, or the file of ``--zip``.
        network: the entry point; may be left out where there is only one.
        policy: ``serial`` runs the parts one by one in the caller's thread; ``threads`` too, in a thread on each device, so
            that a device takes whole requests; ``processes`` runs each part in a pinned process of its own. If a part is for
            eager and ``trust`` is not given, pinned worker processes take the place of the caller's thread and of the threads.
        devices: the devices, or their names with commas between; by default those of the plan if all are CPU cores that
            are here, else all devices. With fewer devices than the plan has, parts share them; with more, the slowest parts
            get replicas (``processes``).
        trust: whether you trust the maker of the bundle. Then native code in it runs, which parts for inductor need; parts for
            eager run in your process and call every operator.
        verify: False leaves out the hashes of the files.
        cuts: whether ``engine`` answers with the outputs of every part, in the order of the parts, for ``dumps.write_dump``.
    Raises: BundleError: the bundle is damaged, of another version, or needs native code or custom operators. BackendError: a
        runtime refuses a part. MissingExtraError: a runtime is not installed. DeviceError: a device is not here.
    """
    if policy not in get_args(Policy):
        raise UsageError(f"policy must be one of {', '.join(get_args(Policy))}, but is {policy!r}")
    with ExitStack() as stack:
        folder, manifest = stack.enter_context(unpacked(Path(path)))
        name = manifest.network(network)
        check_files(folder, manifest.files, hashed=verify)
        require_runtimes(manifest.networks[name])
        require_trust(manifest.networks[name], trust)
        placements = place_parts(folder, manifest, name, devices, trust)
        chosen = manifest.networks[name]
        outputs = [spec.name for part in chosen.parts for spec in part.outputs] if cuts else chosen.outputs
        if policy == "processes":
            engine: Engine = stack.enter_context(Pipeline(placements, chosen.inputs, outputs))
        else:
            raise_faults(PlanError, "the parts do not fit together", faults_of(placements, chosen.inputs, outputs))
            devices_there = tuple(dict.fromkeys(device for part in placements for device in part.devices))
            on = devices_there if policy == "threads" else devices_there[:1]
            stage = as_one_stage(name, placements, chosen.inputs, outputs, on)
            run = Pipeline if stage.module.isolated else InProcess
            engine = stack.enter_context(run([stage], chosen.inputs, outputs))
        return OpenBundle(manifest, name, engine, stack.pop_all())


def require_runtimes(network: Network) -> None:
    """Raises: MissingExtraError: a runtime is not installed. The packages that export and compile are not needed."""
    absent = [name for name in dict.fromkeys(part.backend for part in network.parts) if find_spec(PACKAGES[name][0]) is None]
    if absent:
        names = " ".join(PACKAGES[name][0] for name in absent)
        raise MissingExtraError(f"the bundle has parts for {' and '.join(absent)}, which is not installed: pip install {names}")


def require_trust(network: Network, trust: bool) -> None:
    """Raises: BundleError: a part is native code, which is not allowed, or needs operators whose module is not imported."""
    native = [part.name for part in network.parts if named_backend(part.backend).native]
    if native and not trust:
        raise BundleError(
            f"part '{native[0]}' of the bundle is native code (an AOTInductor library), which can do all that you can; give "
            "trust=True (--trust) if you trust the maker of the bundle"
        )
    absent = {module for part in network.parts for module in part.operators if module not in sys.modules}
    if absent:
        raise BundleError(
            f"the bundle calls custom operators of {', '.join(sorted(absent))}, and a bundle imports no code by itself; import "
            "that module first"
        )


def place_parts(folder: Path, manifest: Manifest, name: str, devices: Devices | None, trust: bool) -> list[StagePlacement]:
    """The parts of a network as the runtime takes them."""
    network = manifest.networks[name]
    there = _devices(network, devices)
    installed = {package: version_of(package) for package in manifest.versions.keys() - {"python"}}
    same = manifest.cpu == cpu_name() and installed.items() <= manifest.versions.items()

    def module(part: Part) -> BundlePart:
        weights_bytes = manifest.files[WEIGHTS].num_bytes
        return BundlePart(folder.resolve(), manifest.weights_key, weights_bytes, part, network.precision, same, trust)

    def placement(part: Part, on: tuple[Device, ...]) -> StagePlacement:
        forms = part.at_each_size()
        modules = [module(part)] * len(forms) if part.is_free else [module(form) for form in forms]
        return StagePlacement(
            name=part.name,
            module=modules[0],
            inputs=part.inputs,
            outputs=part.outputs,
            devices=on,
            threads=max(1, min(part.threads, *(len(device.cores) or part.threads for device in on))),
            queue_depth=network.queue_depth,
            streams=part.streams,
            variants=tuple(Variant(one, form.inputs, form.outputs) for one, form in zip(modules[1:], forms[1:], strict=True)),
        )

    return [placement(part, on) for part, on in zip(network.parts, mapped_devices(network.parts, there), strict=True)]


def _devices(network: Network, devices: Devices | None) -> tuple[Device, ...]:
    if devices is not None:
        return as_machine(devices).devices
    planned = [parse_device(name) for name in dict.fromkeys(name for part in network.parts for name in part.devices)]
    here = set(affinity())
    if all(device.kind == "cpu" and set(device.cores) <= here for device in planned):
        return tuple(planned)
    return discover().devices


def mapped_devices(parts: Sequence[Part], there: Sequence[Device]) -> list[tuple[Device, ...]]:
    """The devices of each part, one for each replica.

    A device that the plan names and that is there stays. Otherwise the plan's devices, in the order of their first part, are
    mapped to the present devices: several to one where there are fewer, one each where there are enough. Each device that is
    left over becomes a replica of the part with the most seconds for each replica.
    """
    planned = list(dict.fromkeys(name for part in parts for name in part.devices))
    by_name = {device.name: device for device in there}
    if all(name in by_name for name in planned):
        target = {name: by_name[name] for name in planned}
    else:
        count = min(len(planned), len(there))
        target = {name: there[position * count // len(planned)] for position, name in enumerate(planned)}
    found = [list(dict.fromkeys(target[name] for name in part.devices)) for part in parts]
    used = {device for devices in found for device in devices}
    for device in there:
        if device not in used:
            loads_s = [part.load_s / len(devices) for part, devices in zip(parts, found, strict=True)]
            found[loads_s.index(max(loads_s))].append(device)
    return [tuple(devices) for devices in found]
