"""A program that serves a checkpoint with a real SGLang and prints tokens as JSON: `engine.py MODEL OPTIONS PROMPT`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    folder, options, prompt = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    ranks = options.pop("ranks", 1)
    os.environ.update(SGLANG_CPU_OMP_THREADS_BIND="|".join("01"[:ranks]), OMP_NUM_THREADS="1")
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"  # it would take the library of CUDA for its ranks on the CPU
    import sglang

    engine = sglang.Engine(
        model_path=folder,
        load_format="bytecheckpoint",
        model_loader_extra_config=json.dumps(options),
        tp_size=ranks,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        skip_tokenizer_init=True,
        mem_fraction_static=0.3,
        max_total_tokens=512,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        log_level="info",
    )

    def tokens() -> list[int]:
        (found,) = engine.generate(
            input_ids=[prompt], sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        )
        made: list[int] = found["output_ids"]
        return made

    print("RESULT", json.dumps({"tokens": tokens()}), flush=True)
    for line in sys.stdin:  # addresses of other checkpoints
        found: dict[str, Any] = {}
        found["updated"], found["message"], *_ = engine.update_weights_from_disk(
            line.strip(), load_format="bytecheckpoint"
        )
        print("RESULT", json.dumps({**found, "tokens": tokens()}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
