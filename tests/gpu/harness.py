"""The two questions asked of every form of launch: is it in the graph, and does it wait for its input?"""

import gc

import torch

#: Cycles of the delay kernel: far longer than any launch takes.
DELAY = 2_000_000
N = 100


def captured(call, device="cuda", add=1.0, warm_up=True):
    """What ``call(x, out)`` leaves in ``out``: right after the capture, and after each of two replays.

    ``out`` is -1 before the capture and NaN before each replay; ``x`` is 41 and then 7. A kernel that is in the graph
    gives (-1, 41 + add, 7 + add).
    """
    with torch.cuda.device(device):
        x, out = torch.zeros(N, device=device), torch.zeros(N, device=device)
        if warm_up:
            call(x, out)
        torch.cuda.synchronize()
        out.fill_(-1)
        # The DSL unloads a kernel's library when the kernel is collected, which no capture survives.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        # torch keeps one capture stream for the process, on the device of the first capture.
        with torch.cuda.graph(graph, stream=fresh_stream()):
            call(x, out)
        torch.cuda.synchronize()
        seen = [out.tolist()[-1]]
        for value in (41.0, 7.0):
            x.fill_(value)
            out.fill_(float("nan"))
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert len(set(out.tolist())) == 1 or out.isnan().any()
            seen.append(out.tolist()[-1])
    return tuple(seen)


def fresh_stream():
    """A stream that torch.cuda.graph does not capture on; torch hands out the same 32 streams in turn."""
    while True:
        stream = torch.cuda.Stream()
        taken = torch.cuda.graph.default_capture_stream
        if taken is None or stream.cuda_stream != taken.cuda_stream:
            return stream


RIGHT = (-1.0, 42.0, 8.0)


def is_missing(seen):
    """Whether the kernel ran at capture and is not in the graph: 1 at capture, then the poison (NaN != NaN)."""
    return seen[0] == 1.0 and seen[1] != seen[1] and seen[2] != seen[2]


def eager_rounds(call, rounds=200, device="cuda", add=1.0):
    """How many of the rounds are right when the input comes late, on a side stream that is torch's current stream."""
    right = 0
    with torch.cuda.device(device):
        x, out = torch.zeros(N, device=device), torch.zeros(N, device=device)
        side = torch.cuda.Stream()
        call(x, out)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for i in range(rounds):
                x.fill_(-5.0)
                out.fill_(float("nan"))
                side.synchronize()
                torch.cuda._sleep(DELAY // 10)
                x.fill_(float(i))
                call(x, out)
                side.synchronize()
                right += out.tolist() == [i + add] * N
    return right
