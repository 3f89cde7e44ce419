// A C++ extension of torch's, with the ways in which such launches miss torch's current stream. All compute out = x + 1.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

namespace {
__global__ void add_one(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + 1.0f;
}

__global__ void prepare(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i];
}

constexpr int THREADS = 128;
int blocks(const torch::Tensor& x) { return (x.numel() + THREADS - 1) / THREADS; }

void add_one_on(const torch::Tensor& x, torch::Tensor& out, cudaStream_t stream) {
    add_one<<<blocks(x), THREADS, 0, stream>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void right(torch::Tensor x, torch::Tensor out) { add_one_on(x, out, at::cuda::getCurrentCUDAStream()); }

void no_stream(torch::Tensor x, torch::Tensor out) { add_one_on(x, out, nullptr); }

// The helper kernel was forgotten when the main one got its stream.
void forgets_once(torch::Tensor x, torch::Tensor out) {
    prepare<<<blocks(x), THREADS>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
    add_one_on(out, out, at::cuda::getCurrentCUDAStream());
}

void pool_stream(torch::Tensor x, torch::Tensor out) { add_one_on(x, out, c10::cuda::getStreamFromPool()); }

void own_stream(torch::Tensor x, torch::Tensor out) {
    static cudaStream_t own = nullptr;
    if (own == nullptr) C10_CUDA_CHECK(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    add_one_on(x, out, own);
}

// Validation as it is left in: the host waits, and nobody looks at the error.
void waits(torch::Tensor x, torch::Tensor out) {
    right(x, out);
    cudaStreamSynchronize(at::cuda::getCurrentCUDAStream());
    cudaGetLastError();
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("right", &right);
    module.def("no_stream", &no_stream);
    module.def("forgets_once", &forgets_once);
    module.def("pool_stream", &pool_stream);
    module.def("own_stream", &own_stream);
    module.def("waits", &waits);
}
