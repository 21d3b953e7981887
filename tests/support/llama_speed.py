"""Tokens per second of GGUF files in llama.cpp: run with the Python of an environment that has xllamacpp. The KV memory
is in llama.cpp's log, on standard error ("KV buffer size").

    python llama_speed.py CONTEXT THREADS MODEL.gguf…
"""

import json
import sys
import urllib.request

from llama_server import serve

NEW = 64


def timings(address: str, prompt: list[int]) -> dict:
    body = {"prompt": prompt, "n_predict": NEW, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return json.load(answer)["timings"]


if __name__ == "__main__":
    context, threads, *models = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    ids = [100 + n * 7919 % 40_000 for n in range(context - NEW - 8)]
    servers = {model: serve(model, context, 512, threads) for model in models}
    for turn in range(3):  # in turns, so that a machine that slows down slows all
        for model, server in servers.items():
            found = timings(server.listening_address, ids)
            rates = {name: round(found[f"{name}_per_second"], 1) for name in ("prompt", "predicted")}
            print(f"{turn} {model}: {len(ids):,} tokens of prompt, tokens per second {rates}", flush=True)
