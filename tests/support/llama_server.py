"""A llama.cpp server: run with the Python of an environment that has xllamacpp. It prints its address as a line, serves
until standard input ends, and writes llama.cpp's log to standard error.

    python llama_server.py MODEL.gguf CONTEXT UBATCH
"""

import sys

import xllamacpp


def serve(model: str, context: int, ubatch: int, threads: int = 1) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_ubatch, params.n_batch = context, ubatch, ubatch
    params.n_parallel, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 1, threads, threads
    params.warmup, params.fit_params, params.verbosity = False, False, 4
    return xllamacpp.Server(params)


if __name__ == "__main__":
    server = serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(server.listening_address, flush=True)
    sys.stdin.read()
