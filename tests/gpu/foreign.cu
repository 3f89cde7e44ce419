// Kernels behind plain C functions, as people write them for ctypes. All compute out = x + 1.
//
//   nvcc -O2 -arch=sm_90 -shared -Xcompiler -fPIC -cudart static -o libforeign-static.so foreign.cu
#include <cuda_runtime.h>

namespace {
__global__ void add_one(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + 1.0f;
}

__global__ void copy(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i];
}

constexpr int THREADS = 128;
int blocks(int n) { return (n + THREADS - 1) / THREADS; }
}  // namespace

extern "C" {
int stream_last(const float* x, float* out, int n, cudaStream_t stream) {
    add_one<<<blocks(n), THREADS, 0, stream>>>(x, out, n);
    return cudaGetLastError();
}

int stream_first(cudaStream_t stream, const float* x, float* out, int n) { return stream_last(x, out, n, stream); }

int no_stream(const float* x, float* out, int n) { return stream_last(x, out, n, nullptr); }

// The first launch forgets the stream.
int forgets_once(const float* x, float* out, int n, cudaStream_t stream) {
    copy<<<blocks(n), THREADS>>>(x, out, n);
    add_one<<<blocks(n), THREADS, 0, stream>>>(out, out, n);
    return cudaGetLastError();
}

// A stream of its own, that nobody can know of.
int own_stream(const float* x, float* out, int n) {
    static cudaStream_t own = nullptr;
    if (own == nullptr) cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking);
    return stream_last(x, out, n, own);
}

// What the launch functions of CUDA's runtime and driver take.
const void* kernel_symbol() { return reinterpret_cast<const void*>(&add_one); }

int kernel_function(cudaFunction_t* function) { return cudaGetFuncBySymbol(function, kernel_symbol()); }
}
