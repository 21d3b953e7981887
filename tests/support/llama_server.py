"""A llama.cpp server: run with the Python of an environment that has xllamacpp. It prints its address as a line, serves
until standard input ends, and writes llama.cpp's log to standard error.

    python llama_server.py MODEL.gguf CONTEXT UBATCH
"""

import sys

import xllamacpp

if __name__ == "__main__":
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_ubatch, params.n_batch = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[3])
    params.n_parallel, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 1, 1, 1
    params.warmup, params.fit_params, params.verbosity = False, False, 4
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
