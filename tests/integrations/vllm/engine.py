"""A program that serves a checkpoint with a real vLLM and prints tokens as JSON: `engine.py MODEL OPTIONS PROMPT`."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
from hashlib import sha256
from typing import Any

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def report_of(worker: Any) -> list[int]:
    """Return what a rank of the engine read, and what it got from others."""
    report = worker.get_model().bytecheckpoint_report
    return [report.bytes_read, getattr(report, "bytes_received", 0)]


def weights_of(worker: Any) -> dict[str, str]:
    """Return a digest of each parameter of a rank."""
    parameters = worker.get_model().named_parameters()
    return {name: sha256(value.detach().contiguous().numpy().tobytes()).hexdigest() for name, value in parameters}


def main() -> None:
    folder, options, prompt = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    generate, held, given = options.pop("generate", True), options.pop("held", False), options.pop("engine", {})
    spawned = options.pop("spawned", False)
    load_format = given.pop("load_format", "bytecheckpoint")
    ranks = given.get("tensor_parallel_size", 1) * given.get("pipeline_parallel_size", 1)
    os.environ.update(ENVIRONMENT, VLLM_CPU_OMP_THREADS_BIND="|".join("01"[:ranks]), VLLM_LOGGING_LEVEL="WARNING")
    import vllm.utils.system_utils

    if not spawned:  # an import of vLLM takes ten seconds of a core: the engine's processes are forked after it
        vllm.utils.system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
        import vllm.v1.engine.core
        import vllm.v1.worker.cpu_worker
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    executor = {"distributed_executor_backend": "mp"} if ranks > 1 else {}
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        load_format=load_format,
        worker_extension_cls="plain_weights.PlainWeights" if held else "",
        model_loader_extra_config=options,
        **executor,
        **given,
    )
    if not generate:
        reports = engine.collective_rpc(report_of) if load_format == "bytecheckpoint" else []
        print("RESULT", json.dumps({"weights": engine.collective_rpc(weights_of), "reports": reports}), flush=True)
        return
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)

    def tokens() -> list[int]:
        (found,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        return list(found.outputs[0].token_ids)

    def print_state(failed: str) -> None:
        """Print what the engine generates and holds, and what it has read."""
        found = {"tokens": tokens(), "failed": failed, "reports": [], "fingerprints": []}
        with contextlib.suppress(Exception):  # after a call that failed, vLLM replies with the other rank's error
            found["reports"] = engine.collective_rpc(report_of) if not failed else []
            found["fingerprints"] = engine.collective_rpc("bytecheckpoint_fingerprint") if held and not failed else []
        print("RESULT", json.dumps(found), flush=True)

    print_state("")
    for line in sys.stdin:  # addresses of other checkpoints, "call METHOD", or "flip PARAMETER METHOD"
        failed = ""
        try:
            if line.startswith("flip "):
                _, parameter, method = line.split()
                engine.collective_rpc("flip", args=(parameter, 1))
                try:
                    engine.collective_rpc(method)
                finally:
                    engine.collective_rpc("flip", args=(parameter, 1))
            elif line.startswith("call "):
                engine.collective_rpc(line.split()[1])
            else:
                engine.collective_rpc("reload_weights", kwargs={"weights_path": line.strip()} if line.strip() else {})
        except Exception as error:  # noqa: BLE001  printed
            failed = str(error)
        print_state(failed)


if __name__ == "__main__":
    main()
