/* A libcuda.so.1 without a device, for tests of the ctypes layer: each call is noted with its arguments, and copies are
   made at once. Compiled against NVIDIA's own cuda.h, so that a signature that differs from it does not compile. */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(CUmemcpyAttributes) == 24, "the size that the ctypes structure has");

static char notes[1 << 20];
static size_t used;
static char failing[64];
static int failing_code;
static int old_driver;
static __thread int capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static __thread CUcontext current;

static CUresult note(const char *name, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    used += snprintf(notes + used, sizeof notes - used, "%s", name);
    used += vsnprintf(notes + used, sizeof notes - used, format, arguments);
    used += snprintf(notes + used, sizeof notes - used, "\n");
    va_end(arguments);
    return strcmp(name, failing) ? CUDA_SUCCESS : (CUresult)failing_code;
}

/* For the tests. */
const char *stand_in_notes(void) { return notes; }
void stand_in_forget(void) { notes[used = 0] = 0; }
void stand_in_fail(const char *name, int code) { snprintf(failing, sizeof failing, "%s", name); failing_code = code; }
void stand_in_is_old(int old) { old_driver = old; }
int stand_in_capture_mode(void) { return capture_mode; }
size_t stand_in_context(void) { return (size_t)current; }

CUresult CUDAAPI cuInit(unsigned int Flags) { return note("cuInit", " %u", Flags); }
CUresult CUDAAPI cuDriverGetVersion(int *version) { *version = 12080; return note("cuDriverGetVersion", ""); }
CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal + 70; return note("cuDeviceGet", " %d", ordinal); }
CUresult CUDAAPI cuDeviceGetName(char *name, int len, CUdevice dev) { snprintf(name, len, "Stand-in %d", dev); return note("cuDeviceGetName", " %d", dev); }
CUresult CUDAAPI cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev) {
    *pi = attrib == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
    return note("cuDeviceGetAttribute", " %d %d", (int)attrib, dev);
}
CUresult CUDAAPI cuDeviceGetPCIBusId(char *id, int len, CUdevice dev) { snprintf(id, len, "0000:6A:00.0"); return note("cuDeviceGetPCIBusId", " %d", dev); }
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) { *pctx = (CUcontext)0xC0; return note("cuDevicePrimaryCtxRetain", " %d", dev); }
CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev) { return note("cuDevicePrimaryCtxRelease", " %d", dev); }
CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx) { current = ctx; return note("cuCtxSetCurrent", " %zu", (size_t)ctx); }
CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUresult result = note("cuThreadExchangeStreamCaptureMode", " %d", (int)*mode);
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return result;
}
CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    *stream = malloc(1);
    return note("cuStreamCreateWithPriority", " %u %d", flags, priority);
}
CUresult CUDAAPI cuStreamDestroy(CUstream stream) { free(stream); return note("cuStreamDestroy", ""); }
CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) { return note("cuStreamWaitEvent", " %zu %zu %u", (size_t)stream, (size_t)event, flags); }
CUresult CUDAAPI cuEventCreate(CUevent *event, unsigned int flags) { *event = malloc(1); return note("cuEventCreate", " %u", flags); }
CUresult CUDAAPI cuEventDestroy(CUevent event) { free(event); return note("cuEventDestroy", ""); }
CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) { return note("cuEventRecord", " %zu %zu", (size_t)event, (size_t)stream); }
CUresult CUDAAPI cuEventQuery(CUevent event) { return note("cuEventQuery", " %zu", (size_t)event); }
CUresult CUDAAPI cuEventSynchronize(CUevent event) { return note("cuEventSynchronize", " %zu", (size_t)event); }
CUresult CUDAAPI cuMemHostRegister(void *p, size_t bytes, unsigned int flags) { return note("cuMemHostRegister", " %zu %zu %u", (size_t)p, bytes, flags); }
CUresult CUDAAPI cuMemHostUnregister(void *p) { return note("cuMemHostUnregister", " %zu", (size_t)p); }
CUresult CUDAAPI cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags) { *pp = malloc(bytesize); return note("cuMemHostAlloc", " %zu %u", bytesize, Flags); }
CUresult CUDAAPI cuMemFreeHost(void *p) { free(p); return note("cuMemFreeHost", ""); }
CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream) {
    CUresult result = note("cuMemcpyAsync", " %llu %llu %zu %zu", dst, src, size, (size_t)stream);
    if (!result) memcpy((void *)dst, (void *)src, size);
    return result;
}
CUresult CUDAAPI cuGetErrorName(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : NULL;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* cuMemcpyBatchAsync as CUDA 12.8 has it; cuda.h of CUDA 13 declares the later one under this name. */
static CUresult CUDAAPI batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                              size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream stream) {
    CUresult result = note("cuMemcpyBatchAsync", " %zu order=%d flags=%u hints=%d,%d,%d,%d indexes=%zu,%zu %zu", count,
                           (int)attrs->srcAccessOrder, attrs->flags, (int)attrs->srcLocHint.type, attrs->srcLocHint.id,
                           (int)attrs->dstLocHint.type, attrs->dstLocHint.id, *attrsIdxs, numAttrs, (size_t)stream);
    if (result) { *failIdx = count - 1; return result; }
    for (size_t i = 0; i < count; i++) memcpy((void *)dsts[i], (void *)srcs[i], sizes[i]);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    CUresult result = note("cuGetProcAddress", " %s %d %llu", symbol, version, (unsigned long long)flags);
    int found = !old_driver && version == 12080 && !strcmp(symbol, "cuMemcpyBatchAsync");
    *pfn = found ? (void *)batch : NULL;
    *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    return result;
}
