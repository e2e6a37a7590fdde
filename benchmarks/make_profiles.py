"""Measure the profiles that are committed under profiles/, on two single-core devices of this machine.

    python -m benchmarks.make_profiles [--models NAME ...] [--backends eager,onnxruntime] [--keep]

Run it on a quiet machine: how long other processes had the cores is noted in each file, and printed here.
"""

import argparse
import time
from pathlib import Path

from autosplit.devices.discovering import machine_for
from autosplit.devices.limits import usable_cores
from autosplit.measuring import Store, measure
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model

ROOT = Path(__file__).parents[1] / "profiles"
MODELS = {
    "resnet50": "transformers:ResNetForImageClassification",
    "mobilenet": "transformers:MobileNetV2Model",
    "bert": "transformers:BertModel",
    "vit": "transformers:ViTModel",
    "gpt2": "transformers:GPT2Model?use_cache=false",
    "unet": "autosplit.examples.unet:unet",
    "mlp512": "autosplit.examples.mlp:mlp_512",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backends", default="eager,onnxruntime")
    parser.add_argument("--keep", action="store_true", help="measure only what is not there yet")
    parser.add_argument("--into", type=Path, default=ROOT)
    arguments = parser.parse_args()
    machine = machine_for(",".join(f"cpu:{core}" for core in usable_cores()[:2]))
    backends = arguments.backends.split(",")
    for name in arguments.models:
        traced = trace(load_model(MODELS[name]))
        start = time.perf_counter()
        profile = measure(traced, machine, backends, store=Store(arguments.into), remeasure=not arguments.keep)
        print(f"\n{name}: {len(traced.graph.ops)} ops in {time.perf_counter() - start:.1f} s")
        for row in profile.summary():
            print(
                f"  {row['device']} {row['backend']:<12} whole {row['whole_s'] * 1e3:8.3f} ms (spread {row['spread']:.1%}), "
                f"alone {row['alone_s'] * 1e3:8.3f} ms, op sums x {row['op_scale']:.3f}, {row['source']}"
            )
        for note in profile.notes:
            print(f"  note: {note}")


if __name__ == "__main__":
    main()
