/* An emulated libamdhip64.so: the ABI of AMD's HIP runtime, as far as batched copies between host and device need it.
 *
 * Not measured on hardware: behaviour follows AMD's sources and public reports. `version` (major * 10^7 + minor * 10^5 +
 * patch) chooses it. From 7.1 there is a batch call; up to 7.12 it refuses attributes and loops, so that copies before a
 * failing one stay queued; from 7.13 it takes attributes and batches, and a batch of more than `batch_limit` (8192)
 * faults. attributes_refused and batch_refused make a runtime that does not do what its version says; compiled with
 * -DWITHOUT_BATCH it lacks the call, as runtimes before 7.1 do.
 */
#include "device.h"

typedef int hipError_t;
typedef struct { int type, id; } hipMemLocation;
typedef struct { int srcAccessOrder; hipMemLocation srcLocHint, dstLocHint; unsigned flags; } hipMemcpyAttributes;
typedef struct {
    int type, device;
    void *devicePointer, *hostPointer;
    int isManaged;
    unsigned allocationFlags;
} hipPointerAttribute_t;
_Static_assert(sizeof(hipMemcpyAttributes) == 24 && sizeof(hipPointerAttribute_t) == 32, "as in the real ABI");

static __thread int current, last_error;

#define RUNTIME_VERSION (emu.version ? emu.version : 71500000)
#define WORD(handle) ((uint64_t)(uintptr_t)(handle))

static hipError_t say(hipError_t code) { /* a runtime, unlike a driver, remembers a thread's last error */
    if (code && code != NOT_READY) last_error = code;
    return code;
}

EXPORT hipError_t hipGetLastError(void) { int code = last_error; last_error = 0; return code; }
EXPORT hipError_t hipPeekAtLastError(void) { return last_error; }

EXPORT hipError_t hipRuntimeGetVersion(int *version) { *version = (int)RUNTIME_VERSION; return OK; }
EXPORT hipError_t hipDriverGetVersion(int *version) { *version = (int)RUNTIME_VERSION; return OK; }
EXPORT hipError_t hipInit(unsigned flags) { return say(flags ? INVALID_VALUE : emu.devices ? OK : NO_DEVICE); }

EXPORT hipError_t hipGetDeviceCount(int *count) {
    *count = (int)emu.devices;
    return say(getpid() != owner ? NOT_INITIALIZED : emu.devices ? OK : NO_DEVICE);
}

EXPORT hipError_t hipSetDevice(int device) {
    if (device < 0 || device >= (int)emu.devices) return say(INVALID_DEVICE);
    current = device;
    return OK;
}

EXPORT hipError_t hipGetDevice(int *device) { *device = current; return OK; }
EXPORT hipError_t hipDeviceSynchronize(void) { return say(device_sync()); }

/* --- memory --- */

EXPORT hipError_t hipMalloc(void **address, size_t nbytes) {
    return say(device_alloc((uint64_t *)address, nbytes, (uint64_t)current));
}

EXPORT hipError_t hipFree(void *address) { return say(address ? device_free(WORD(address)) : OK); }

EXPORT hipError_t hipHostRegister(void *address, size_t nbytes, unsigned flags) {
    (void)flags;
    return say(host_register(WORD(address), nbytes, 1)); /* a second registration passes in silence */
}

EXPORT hipError_t hipHostUnregister(void *address) { return say(host_unregister(WORD(address))); }

EXPORT hipError_t hipHostGetDevicePointer(void **alias, void *address, unsigned flags) {
    return say(flags || !alias ? INVALID_VALUE : host_alias((uint64_t *)alias, WORD(address)));
}

EXPORT hipError_t hipPointerGetAttributes(hipPointerAttribute_t *attributes, const void *address) {
    int code = enter();
    if (code) return say(code);
    Owner who = owner_of(WORD(address));
    int old = RUNTIME_VERSION < 60000000; /* the values of the memory types changed with 6.0 */
    if (who.kind == NOBODYS && old) return say(leave(INVALID_VALUE));
    memset(attributes, 0, sizeof *attributes);
    attributes->type = who.kind == DEVICE ? (old ? 1 : 2) : who.kind == HOST ? (old ? 0 : 1) : 0;
    attributes->device = who.kind == NOBODYS ? -1 : (int)who.device;
    if (who.kind == DEVICE) attributes->devicePointer = (void *)address;
    if (who.kind == HOST) {
        attributes->hostPointer = (void *)address;
        attributes->devicePointer = (void *)(uintptr_t)(WORD(address) + emu.alias_offset);
    }
    return leave(OK);
}

EXPORT hipError_t hipMemGetAddressRange(void **start, size_t *nbytes, void *address) {
    int code = enter();
    if (code) return say(code);
    Owner who = owner_of(WORD(address));
    if (who.kind == NOBODYS) return say(leave(NOT_FOUND));
    if (start) *start = (void *)(uintptr_t)who.start;
    if (nbytes) *nbytes = who.nbytes;
    return leave(OK);
}

/* --- copies --- */

EXPORT hipError_t hipMemcpyAsync(void *dst, const void *src, size_t nbytes, int kind, void *stream) {
    return say(kind < 0 || kind > 4 ? INVALID_VALUE : copy_one(WORD(dst), WORD(src), nbytes, WORD(stream)));
}

EXPORT hipError_t hipMemcpy(void *dst, const void *src, size_t nbytes, int kind) {
    int code = hipMemcpyAsync(dst, src, nbytes, kind, NULL);
    return code ? code : say(stream_sync(0));
}

#ifndef WITHOUT_BATCH
static int batch(uint64_t *dsts, uint64_t *srcs, size_t *sizes, size_t count, hipMemcpyAttributes *attributes,
                 size_t *firsts, size_t number, size_t *fail, uint64_t handle) {
    int old = RUNTIME_VERSION < 71300000;
    ENTER();
    emu.batch_calls++;
    if (!fail) return leave(INVALID_VALUE);
    *fail = NONE;
    if (emu.batch_refused || (number && (old || emu.attributes_refused))) return leave(NOT_SUPPORTED);
    STREAM(stream, handle);
    if (!dsts || !srcs || !sizes || !count) return leave(INVALID_VALUE);
    for (size_t i = 0; i < count; i++)
        if (!sizes[i]) return leave(INVALID_VALUE);
    if (number) {
        if (!attributes || !firsts || firsts[0] || number > count) return leave(INVALID_VALUE);
        for (size_t i = 0; i < number; i++)
            if (attributes[i].srcAccessOrder < 1 || attributes[i].srcAccessOrder > 3) return leave(INVALID_VALUE);
        emu.batch_with_attributes++;
    }
    int code = capture_refuses(stream), wait = 0;
    if (code) return leave(code);
    uint64_t limit = emu.batch_limit ? emu.batch_limit : old ? UINT64_MAX : 8192;
    if (count > limit) die("Memory access fault by GPU: batch of", count);
    emu.batch_copies += count;
    if (count > emu.largest_batch) emu.largest_batch = count;
    Copy *copies = malloc(count * sizeof *copies);
    size_t blame, i, bad = due(count, &code);
    int wanted = code;
    if (wanted && bad == NONE) { /* the call as a whole */
        free(copies);
        return leave(wanted);
    }
    for (i = 0, code = OK; i < count; i++) {
        char *src;
        if (wanted && i == bad) {
            code = wanted;
            break;
        }
        copies[i].size = sizes[i];
        code = locate(dsts[i], sizes[i], i, &copies[i].dst, &wait, &blame);
        if (!code) code = locate(srcs[i], sizes[i], i, &src, &wait, &blame);
        if (code) break;
        copies[i].src = src;
    }
    if (code) *fail = i;
    enqueue(stream, copies, code && !old ? 0 : i, wait); /* a loop leaves what came before the bad one */
    return leave(code == -1 ? INVALID_VALUE : code);
}

EXPORT hipError_t hipMemcpyBatchAsync(void **dsts, void **srcs, size_t *sizes, size_t count,
                                      hipMemcpyAttributes *attributes, size_t *firsts, size_t number, size_t *fail,
                                      void *stream) {
    return say(batch((uint64_t *)dsts, (uint64_t *)srcs, sizes, count, attributes, firsts, number, fail, WORD(stream)));
}
#endif

/* --- streams, events, capture --- */

EXPORT hipError_t hipStreamCreateWithFlags(void **stream, unsigned flags) { return say(stream_create(stream, flags)); }
EXPORT hipError_t hipStreamDestroy(void *stream) { return say(stream_destroy(WORD(stream))); }
EXPORT hipError_t hipStreamSynchronize(void *stream) { return say(stream_sync(WORD(stream))); }
EXPORT hipError_t hipStreamQuery(void *stream) { return say(stream_query(WORD(stream))); }

EXPORT hipError_t hipStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    return say(flags ? INVALID_VALUE : stream_wait_event(WORD(stream), event));
}

EXPORT hipError_t hipLaunchHostFunc(void *stream, void (*call)(void *), void *argument) {
    return say(host_function(WORD(stream), call, argument));
}

EXPORT hipError_t hipEventCreateWithFlags(void **event, unsigned flags) { (void)flags; return say(event_create(event)); }
EXPORT hipError_t hipEventDestroy(Event *event) { return say(event_destroy(event)); }
EXPORT hipError_t hipEventRecord(Event *event, void *stream) { return say(event_record(event, WORD(stream))); }
EXPORT hipError_t hipEventQuery(Event *event) { return say(event_query(event)); }
EXPORT hipError_t hipEventSynchronize(Event *event) { return say(event_sync(event)); }
EXPORT hipError_t hipStreamBeginCapture(void *stream, int mode) { return say(capture_begin(WORD(stream), mode)); }
EXPORT hipError_t hipStreamEndCapture(void *stream, void **graph) { return say(capture_end(WORD(stream), graph)); }
EXPORT hipError_t hipStreamIsCapturing(void *stream, int *status) { return say(capture_status(WORD(stream), status)); }
EXPORT hipError_t hipThreadExchangeStreamCaptureMode(int *mode) { return say(exchange_mode(mode)); }

/* --- errors --- */

static const struct { int code; const char *name, *text; } errors[] = {
    {OK, "hipSuccess", "no error"},
    {INVALID_VALUE, "hipErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "hipErrorOutOfMemory", "out of memory"},
    {NOT_INITIALIZED, "hipErrorNotInitialized", "initialization error"},
    {NO_DEVICE, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {INVALID_DEVICE, "hipErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_CONTEXT, "hipErrorInvalidContext", "invalid device context"},
    {INVALID_HANDLE, "hipErrorInvalidHandle", "invalid resource handle"},
    {NOT_FOUND, "hipErrorNotFound", "named symbol not found"},
    {NOT_READY, "hipErrorNotReady", "device not ready"},
    {ILLEGAL_ADDRESS, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {ALREADY_REGISTERED, "hipErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "hipErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {LAUNCH_FAILED, "hipErrorLaunchFailure", "unspecified launch failure"},
    {NOT_SUPPORTED, "hipErrorNotSupported", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "hipErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
};

EXPORT const char *hipGetErrorName(hipError_t code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].name;
    return "hipErrorUnknown";
}

EXPORT const char *hipGetErrorString(hipError_t code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].text;
    return "unknown error";
}
