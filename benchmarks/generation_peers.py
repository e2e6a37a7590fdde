"""Programs that generate text, each in a process of its own, for ``benchmarks.generation``.

    python -m benchmarks.generation_peers WAY FOLDER THREADS

FOLDER holds a model of transformers with its tokenizer. The process converts it for its way, says ``{"version": ...}``, and
answers each line ``{"prompts": [[id, ...], ...], "new": 24}`` with the seconds until all prompts have their first token and
until all have their last, the tokens per second between, the new ids of the first prompt, and its memory. It needs nothing of
autosplit.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Mark = Callable[..., None]
"""Called with the numbers of the sequences that have a further token now."""

Generate = Callable[[Prompts, int, Mark], list[int]]
"""From prompts of equal length and a number of new tokens to the new ids of the first prompt."""


def timed(generate: Generate, prompts: Prompts, new: int) -> dict[str, Any]:
    """What is sent for a request; a program may let sequences begin and end one after the other.

    The rate counts tokens of the time in which all sequences have a first token and none has its last.
    """
    begun_s, times_s = time.perf_counter(), [list[float]() for _ in prompts]

    def mark(*numbers: int) -> None:
        now_s = time.perf_counter() - begun_s
        for number in numbers:
            times_s[number].append(now_s)

    ids = generate(prompts, new, mark)
    first_s, end_s = max(one[0] for one in times_s), min(one[-1] for one in times_s)
    inside = [[at for at in one if first_s <= at <= end_s] for one in times_s]
    rates = [(len(one) - 1) / (one[-1] - one[0]) for one in inside if len(one) > 1]
    return {
        "first_s": first_s,
        "tokens_per_s": sum(rates) if len(rates) == len(prompts) else None,
        "all_s": max(one[-1] for one in times_s),
        "ids": ids,
        "memory_bytes": memory_bytes(os.getpid()),
    }


def memory_bytes(pid: int) -> int:
    """Memory of a process and those that it started, each page by its share."""
    with contextlib.suppress(OSError):  # it ended
        words = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").split()
        started = " ".join(path.read_text(encoding="utf-8") for path in Path(f"/proc/{pid}/task").glob("*/children"))
        return (int(words[words.index("Pss:") + 1]) << 10) + sum(memory_bytes(int(child)) for child in started.split())
    return 0


def transformers_generate(cache: str | None) -> Callable[[Path, int], Generate]:
    """``generate`` of transformers with a kind of cache, by default one that grows."""

    def start(folder: Path, threads: int) -> Generate:
        import torch
        from transformers import AutoModelForCausalLM, StoppingCriteriaList

        torch.set_num_threads(threads)
        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()

        def generate(prompts: Prompts, new: int, mark: Mark) -> list[int]:
            ids = torch.tensor(prompts)

            def after_token(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
                mark(*range(len(ids)))
                return torch.zeros(len(ids), dtype=torch.bool)

            with torch.inference_mode():
                found = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
                    cache_implementation=cache, stopping_criteria=StoppingCriteriaList([after_token]), pad_token_id=0,
                )  # fmt: skip
            tokens: list[int] = found[0, len(prompts[0]) :].tolist()
            return tokens

        return generate

    return start


def onnxruntime_genai(folder: Path, threads: int) -> Generate:
    """onnxruntime-genai in f32 on the file that its own builder makes."""
    import numpy as np
    import onnxruntime_genai as genai

    target = folder / "onnxruntime-genai"
    words = ["-i", str(folder), "-m", str(folder), "-o", str(target), "-p", "fp32", "-e", "cpu", "-c", str(folder / "cache")]
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", *words]
    built = subprocess.run(builder, check=False, capture_output=True, text=True)
    if built.returncode:
        raise RuntimeError(built.stderr.strip().splitlines()[-1].replace(str(folder), "saved"))
    config = genai.Config(str(target))
    options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = genai.Model(config)

    def generate(prompts: Prompts, new: int, mark: Mark) -> list[int]:
        length = len(prompts[0])
        params = genai.GeneratorParams(model)
        params.set_search_options(
            max_length=length + new, min_length=length + new, batch_size=len(prompts), do_sample=False
        )  # fmt: skip
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        for _ in range(new):
            generator.generate_next_token()
            mark(*range(len(prompts)))
        return [int(token) for token in generator.get_sequence(0)[length:]]

    return generate


def openvino_genai(folder: Path, threads: int) -> Generate:
    """openvino-genai in f32 with its paged attention, on a stateful model."""
    target = folder / "openvino-genai"
    write_stateful(folder, target)
    import numpy as np
    import openvino
    import openvino_genai as genai  # after torch, which does not load after its libraries

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = 1  # GB, ten times what the caches of 16 sequences take
    pipeline = genai.ContinuousBatchingPipeline(str(target), scheduling, "CPU", settings)

    def generate(prompts: Prompts, new: int, mark: Mark) -> list[int]:
        options = genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False)
        given = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        handles = [pipeline.add_request(number, ids, options) for number, ids in enumerate(given)]
        first: list[int] = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            ready = [number for number, handle in enumerate(handles) if handle.can_read()]
            mark(*ready)
            made = [next(iter(handles[number].read().values())).generated_ids for number in ready]
            first += made[0] if 0 in ready else []
        return first

    return generate


def write_stateful(folder: Path, target: Path) -> None:
    """Convert a model to the form that openvino-genai takes: caches are states, in the order of ``beam_idx``."""
    import numpy as np
    import openvino
    import torch
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
    from transformers.cache_utils import DynamicLayer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    class WithCache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Any) -> Any:
            cache = DynamicCache()
            for keys, values in zip(past[::2], past[1::2], strict=True):
                layer = DynamicLayer()
                layer.keys, layer.values, layer.is_initialized = keys, values, True
                layer.dtype, layer.device = keys.dtype, keys.device
                cache.layers.append(layer)
            given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
            logits = self.model(**given, past_key_values=cache, use_cache=True).logits
            return (logits, *(part for layer in cache.layers for part in (layer.keys, layer.values)))

    past = [torch.randn(2, heads, 5, dim) for _ in range(2 * config.num_hidden_layers)]
    positions, mask = torch.arange(5, 8).expand(2, 3), torch.ones(2, 8, dtype=torch.long)
    example = {"input_ids": mask[:, :3], "attention_mask": mask, "position_ids": positions, "past": past}
    with torch.no_grad():
        found: Any = openvino.convert_model(WithCache(), example_input=example)
    for number, name in enumerate(("input_ids", "attention_mask", "position_ids")):
        found.inputs[number].get_tensor().set_names({name})
        found.inputs[number].get_node().set_partial_shape(openvino.PartialShape([-1, -1]))
    found.outputs[0].get_tensor().set_names({"logits"})
    order = ops.parameter([-1], openvino.Type.i32, name="beam_idx")
    order.output(0).get_tensor().set_names({"beam_idx"})
    states = list(zip(found.inputs[3:], found.outputs[1:], strict=True))
    found.add_parameters([order])
    for number, (before, after) in enumerate(states):
        before.get_tensor().set_names({f"past.{number}"})
        after.get_tensor().set_names({f"present.{number}"})
        before.get_node().set_partial_shape(openvino.PartialShape([-1, heads, -1, dim]))
        readers = before.get_target_inputs()
        ordered = ops.gather(before, order, ops.constant(np.int64(0)))
        for reader in readers:
            reader.replace_source_output(ordered.output(0))
    found.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(found, {f"past.{number}": f"present.{number}" for number in range(len(states))})
    batch = ops.gather(ops.shape_of(found.input("input_ids")), ops.constant([0]), ops.constant(0))
    sizes = [ops.constant(np.array([size], dtype=np.int64)) for size in (heads, 0, dim)]
    for op in found.get_ops():
        if op.get_type_name() == "ReadValue":
            op.set_arguments([ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, *sizes], axis=0))])
    found.validate_nodes_and_infer_types()
    openvino.save_model(found, target / "openvino_model.xml", compress_to_fp16=False)
    words = convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
    for name, part in zip(("openvino_tokenizer.xml", "openvino_detokenizer.xml"), words, strict=True):
        openvino.save_model(part, target / name)
    config.save_pretrained(target)


def llama_cpp(kind: str) -> Callable[[Path, int], Generate]:
    """llama.cpp with matrices in ``F32`` or ``F16``, by its server in this process."""

    def start(folder: Path, threads: int) -> Generate:
        import xllamacpp

        path = folder / f"{kind}.gguf"
        write_gguf(folder, path, kind)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.n_ctx, params.n_batch = 16, 16 * 256, 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.verbosity = 0
        server = xllamacpp.Server(params)

        def generate(prompts: Prompts, new: int, mark: Mark) -> list[int]:
            found: dict[int, str] = dict.fromkeys(range(len(prompts)), "")

            def ask(number: int) -> None:
                options = {"n_predict": new, "ignore_eos": True, "temperature": 0, "cache_prompt": False, "stream": True}

                def take(part: dict[str, Any]) -> None:
                    mark(number)
                    found[number] += part["choices"][0]["text"]

                server.handle_completions({"prompt": prompts[number], **options}, take)

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return [int(word) for word in found[0].split("w")[1:]]

        return generate

    return start


GGUF_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
"""Names of a layer's weights in GGUF, by those of Llama in transformers."""


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write a Llama model for llama.cpp. Raises: ValueError: it is of another architecture."""
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"this module writes GGUF files of Llama only, not of {config['model_type']}")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    words = [f"w{number}".encode() for number in range(3, config["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *words])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([2, 3, 3, *[1] * len(words)])
    for name, value in load_file(folder / "model.safetensors").items():
        parts = name.split(".")
        if parts[1] == "layers":
            layer = ".".join(parts[3:-1])
            target = f"blk.{parts[2]}.{GGUF_LAYER[layer]}.weight"
            if layer in ("self_attn.q_proj", "self_attn.k_proj"):  # llama.cpp rotates neighbours, transformers halves
                value = value.reshape(-1, 2, config["head_dim"] // 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        else:
            target = "token_embd.weight" if parts[1] == "embed_tokens" else "output_norm.weight"
        wide = kind == "F32" or value.ndim == 1
        writer.add_tensor(target, np.ascontiguousarray(value.astype(np.float32 if wide else np.float16)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WAYS = {
    "transformers, dynamic cache": ("transformers", transformers_generate(None)),
    "transformers, static cache": ("transformers", transformers_generate("static")),
    "onnxruntime-genai": ("onnxruntime-genai", onnxruntime_genai),
    "openvino-genai": ("openvino-genai", openvino_genai),
    "llama.cpp F32": ("xllamacpp", llama_cpp("F32")),
    "llama.cpp F16": ("xllamacpp", llama_cpp("F16")),
}
"""Each way with its package."""


def serve(start: Callable[[Path, int], Generate], package: str, words: list[str]) -> None:
    """Answer the requests on stdin until it ends; what a runtime prints goes to stderr."""
    folder, threads = Path(words[0]), int(words[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        generate = start(folder, threads)
        said: dict[str, Any] = {"version": version(package)}
    except Exception as failure:  # a way that is not installed or refuses the model is left out, and named
        lines = str(failure).strip().splitlines() or [type(failure).__name__]
        said = {"failure": f"{type(failure).__name__}: {lines[0][:200]}"}
    print(json.dumps(said), file=out, flush=True)
    for line in sys.stdin if "version" in said else ():
        request = json.loads(line)
        print(json.dumps(timed(generate, request["prompts"], request["new"])), file=out, flush=True)


if __name__ == "__main__":
    serve(WAYS[sys.argv[1]][1], WAYS[sys.argv[1]][0], sys.argv[2:])
