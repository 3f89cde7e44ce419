"""A tree-verify attention kernel in a .so, validated at every replay of a CUDA graph. Needs a GPU, nvcc and torch:

    pip install .
    python examples/sglang_verify_attention.py

Speculative decoding verifies a tree of draft tokens in one step: each of them attends to the prefix, and to its own
ancestors among the drafts. A custom kernel for that is put into an engine from a start-up file, as such integrations
do: nobody edits the engine's module, a hook replaces a method of its class when it is imported. Here the engine is a
stand-in with that one class (`ENGINE`), and the start-up file (`START_UP`) is the integration.

The kernel is validated against the engine's own method. The graph that the engine captures has both in it, so every
replay is compared. A fault is injected into some replays through a tensor that the kernel reads; the report finds
exactly those.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KERNEL = r"""
#include <cuda_runtime.h>
#include <math.h>

// One block for each draft token and head, one thread for each element of a head (at most 128).
__global__ void verify_attention_kernel(const float* q, const float* k, const float* v, const unsigned char* mask,
                                        const float* fault, float* out, float* lse,
                                        int drafts, int keys, int heads, int size) {
    extern __shared__ float scores[];
    int draft = blockIdx.x, head = blockIdx.y;
    const float* query = q + (draft * heads + head) * size;
    for (int key = threadIdx.x; key < keys; key += blockDim.x) {
        const float* other = k + (key * heads + head) * size;
        float dot = 0.0f;
        for (int i = 0; i < size; ++i) dot += query[i] * other[i];
        scores[key] = mask[draft * keys + key] ? dot * rsqrtf((float)size) : -INFINITY;
    }
    __syncthreads();
    float top = -INFINITY, sum = 0.0f, value = 0.0f;
    for (int key = 0; key < keys; ++key) top = fmaxf(top, scores[key]);
    for (int key = 0; key < keys; ++key) sum += expf(scores[key] - top);
    for (int key = 0; key < keys; ++key)
        value += expf(scores[key] - top) / sum * v[(key * heads + head) * size + threadIdx.x];
    out[(draft * heads + head) * size + threadIdx.x] = value + (draft == drafts - 1 ? *fault : 0.0f);
    if (threadIdx.x == 0) lse[draft * heads + head] = top + logf(sum);
}

extern "C" int verify_attention(const float* q, const float* k, const float* v, const unsigned char* mask,
                                const float* fault, float* out, float* lse,
                                int drafts, int keys, int heads, int size, cudaStream_t stream) {
    verify_attention_kernel<<<dim3(drafts, heads), size, keys * sizeof(float), stream>>>(
        q, k, v, mask, fault, out, lse, drafts, keys, heads, size);
    return (int)cudaGetLastError();
}
"""

ENGINE = '''
"""Stand-in for an engine: its attention backend, in torch."""
import torch


class AttentionBackend:
    def verify(self, q, k, v, mask):
        """Attention of draft tokens: q (drafts, heads, size), k and v (keys, heads, size), mask (drafts, keys)."""
        scores = torch.einsum("dhs,khs->dhk", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
        return torch.einsum("dhk,khs->dhs", scores.softmax(-1), v), scores.logsumexp(-1)
'''

START_UP = '''
"""The integration: imported by Python in every process that has this folder on PYTHONPATH."""
import ctypes
import os

import wrapt

import streamshim

streamshim.install()


@wrapt.when_imported("engine")
def patch(engine):
    import torch

    pointer, number = ctypes.c_void_p, ctypes.c_int
    library = ctypes.CDLL(os.environ["VERIFY_LIBRARY"])
    library.verify_attention.argtypes = [pointer] * 7 + [number] * 4 + [pointer]
    streamshim.bind(library, {"verify_attention": -1})
    engine.fault = torch.zeros((), device="cuda")  # only to show that a wrong kernel is found

    def kernel(backend, q, k, v, mask):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        tensors = (q, k, v, mask, engine.fault, out, lse)
        status = library.verify_attention(*[t.data_ptr() for t in tensors], len(q), *k.shape)
        if status:
            raise RuntimeError(f"verify_attention: CUDA error {status}")
        return out, lse

    verify = streamshim.validate(
        kernel, engine.AttentionBackend.verify, rtol=1e-3, atol=1e-3, name="verify_attention",
        sample=int(os.environ.get("VERIFY_SAMPLE", "1")),
    )
    engine.AttentionBackend.verify = lambda self, q, k, v, mask: verify(self, q, k, v, mask)
'''

DRAFTS, PREFIX, HEADS, SIZE = 7, 249, 8, 64
REPLAYS, FAULTY = 1000, (17, 404, 999)


def tree_mask(device: str):
    """Each draft token sees the prefix, itself and its ancestors in a binary tree."""
    import torch

    mask = torch.zeros(DRAFTS, PREFIX + DRAFTS, dtype=torch.bool)
    mask[:, :PREFIX] = True
    for draft in range(DRAFTS):
        node = draft
        while node >= 0:
            mask[draft, PREFIX + node] = True
            node = (node - 1) // 2
    return mask.to(device)


def decode() -> None:
    """What the engine does: warm up, capture, replay with new inputs. It knows nothing of the kernel."""
    import engine
    import torch

    backend = engine.AttentionBackend()
    q = torch.randn(DRAFTS, HEADS, SIZE, device="cuda")
    k, v = (torch.randn(PREFIX + DRAFTS, HEADS, SIZE, device="cuda") for _ in range(2))
    mask = tree_mask("cuda")

    def step():
        return backend.verify(q, k, v, mask)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    fault = getattr(engine, "fault", torch.zeros((), device="cuda"))
    for number in range(1, REPLAYS + 1):
        q.normal_()
        fault.fill_(0.25 if number in FAULTY else 0.0)
        graph.replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    print(f"one replay takes {begin.elapsed_time(end) / REPLAYS * 1000:.1f} us")
    if os.environ.get("STREAMSHIM_VALIDATE") != "off":
        import streamshim

        print(streamshim.validation_report())


def main() -> None:
    import torch

    nvcc = shutil.which("nvcc")
    if nvcc is None or not torch.cuda.is_available():
        print("This example needs a GPU and nvcc.")
        return
    folder = Path(tempfile.mkdtemp())
    (folder / "verify.cu").write_text(KERNEL)
    (folder / "engine.py").write_text(ENGINE)
    (folder / "sitecustomize.py").write_text(START_UP)
    major, minor = torch.cuda.get_device_capability()
    library = folder / "libverify.so"
    options = ["-O2", "-shared", "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}"]
    subprocess.run([nvcc, *options, "-o", str(library), str(folder / "verify.cu")], check=True)
    paths = [str(folder), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    for words, variables in (
        ("the kernel alone", {"STREAMSHIM_VALIDATE": "off"}),
        ("validated", {}),
        ("validated, one replay in 10 counted", {"VERIFY_SAMPLE": "10"}),
    ):
        print(f"\n{words}", flush=True)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VERIFY_LIBRARY": str(library), **variables}
        subprocess.run([sys.executable, __file__, "decode"], check=True, env=env)
    print(f"\nthe fault was injected into replays {', '.join(map(str, FAULTY))}")


if __name__ == "__main__":
    decode() if sys.argv[1:] == ["decode"] else main()
