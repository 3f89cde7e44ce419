// What is called in the benchmarks: a plain C function and two TVM-FFI functions. Each launches a kernel through the
// driver, or does nothing where there is no GPU: then what is left of a launch is the cost of calling it from Python.
//
// Plain C, so that gcc is enough: the kernel comes from NVRTC, and the addresses of others' functions from Python.
#include <stdint.h>

typedef int (*cu_launch_kernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                                void **, void **);
typedef void *(*env_get_stream)(int32_t, int32_t);

static cu_launch_kernel launch_kernel;
static env_get_stream environment;
static void *kernel;

void on_gpu(cu_launch_kernel address, void *function) { launch_kernel = address, kernel = function; }

int launch(const void *x, void *out, int n, void *stream) {
    void *parameters[] = {&x, &out, &n};
    if (!launch_kernel) return 0;
    return launch_kernel(kernel, (n + 127) / 128, 1, 1, 128, 1, 1, 0, stream, parameters, 0);
}

#ifdef WITH_TVM_FFI
#include <tvm/ffi/c_api.h>

void with_environment(env_get_stream address) { environment = address; }

static void *data(const TVMFFIAny *any) {
    const DLTensor *tensor = any->type_index == kTVMFFIDLTensorPtr
                                 ? (const DLTensor *)any->v_ptr
                                 : (const DLTensor *)((const char *)any->v_ptr + sizeof(TVMFFIObject));
    return tensor->data;
}

// add_one(x, out, n): tensors. Whatever else is given (a stream of CuTe's) is not looked at.
int ffi_tensors(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    return launch_kernel ? launch(data(&args[0]), data(&args[1]), 100, environment(kDLCUDA, 0)) : 0;
}

// add_one_at(x, out, n): addresses.
int ffi_addresses(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    void *stream = environment(kDLCUDA, 0);
    return launch((void *)args[0].v_int64, (void *)args[1].v_int64, (int)args[2].v_int64, stream);
}
#endif
