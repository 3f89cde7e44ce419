// Stands for the driver where there is none, so that cuda.bindings can be called: every function does nothing.
// Its soname is that of the driver; whoever loads "libcuda.so.1" after it gets it.
#include <stdint.h>

static int nothing(void) { return 0; }

int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status) {
    *address = (void *)nothing;
    if (status) *status = 0;
    return 0;
}

int cuGetProcAddress(const char *name, void **address, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, address, version, flags, 0);
}
