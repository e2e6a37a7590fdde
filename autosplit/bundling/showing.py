"""A manifest for people: the parts and the requirements of each."""

from pathlib import Path
from typing import Any

from autosplit.backends.base import named_backend
from autosplit.bundling.manifest import WEIGHTS, Manifest, Part
from autosplit.devices.discovering import PACKAGES
from autosplit.tables import bytes_text


def rows(manifest: Manifest) -> list[dict[str, Any]]:
    """One row a part. ``variants``: the sizes for which it has programs."""
    return [
        {
            "network": name,
            "part": part.name,
            "backend": part.backend,
            "devices": " ".join(part.devices),
            "threads": part.threads,
            "streams": part.streams,
            "variants": "every size" if part.is_free else 1 + len(part.variants),
            "inputs": " ".join(spec.name for spec in part.inputs),
            "outputs": " ".join(spec.name for spec in part.outputs),
            "weights": bytes_text(part.weight_bytes),
            "needs": needs(part, manifest),
        }
        for name, part in manifest.parts
    ]


def needs(part: Part, manifest: Manifest) -> str:
    """The packages and permissions that the loading process needs."""
    runtime = PACKAGES[part.backend][0]
    found = [f"{runtime} (made with {manifest.versions.get(runtime, 'an unknown version')})"]
    if named_backend(part.backend).native:
        found.append("trust=True, for it is native code")
    found += [f"the custom operators of {module}" for module in part.operators]
    return ", ".join(found)


def summary(path: Path, manifest: Manifest) -> str:
    """One sentence: the sizes of requests, the size of the bundle and of its weights."""
    total = sum(file.num_bytes for file in manifest.files.values())
    weights = manifest.files[WEIGHTS].num_bytes
    count = len(manifest.networks)
    ranges = {f"{dim} {text}": None for network in manifest.networks.values() for dim, text in network.ranges.sizes.items()}
    sized = f" for requests of {', '.join(ranges)}" if ranges else ""
    made = ", ".join(f"{package} {version}" for package, version in manifest.versions.items())
    return (
        f"{path}: {count} network{'s' * (count != 1)}{sized}, {bytes_text(total)}, of which weights are {bytes_text(weights)}; "
        f"made on {manifest.cpu or 'an unknown processor'} with {made}"
    )
