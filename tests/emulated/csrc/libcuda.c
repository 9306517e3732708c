/* An emulated libcuda.so.1: the ABI of NVIDIA's driver, as far as batched copies between host and device need it.
 *
 * Argument rules and return codes are those measured on an H200 with driver 580 (CUDA 13.0). Where the real driver ends
 * the process (an address that belongs to nothing), this one does too. Assumed, not measured: 201 for a thread without a
 * context, 900 for a batch on a stream under capture, 1 for a range that leaves its allocation or registration, which
 * calls a capture elsewhere forbids. Kernels are not emulated.
 */
#define FOREIGN_ENDS_PROCESS
#include "device.h"
#include <dlfcn.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct { int type, id; } CUmemLocation;
typedef struct { int srcAccessOrder; CUmemLocation srcLocHint, dstLocHint; unsigned flags; } CUmemcpyAttributes;
_Static_assert(sizeof(CUmemcpyAttributes) == 24, "24 bytes in the real ABI");

typedef struct { uint64_t device, retained; } Context;
static Context contexts[8];
static __thread Context *current;
static int initialised;

#define DRIVER_VERSION (emu.version ? emu.version : 13000)
#define NEED_INIT() do { if (!initialised || getpid() != owner) return NOT_INITIALIZED; } while (0)
#define NEED_CONTEXT() do { NEED_INIT(); if (!current) return INVALID_CONTEXT; } while (0)

EXPORT CUresult cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (getpid() != owner) return NOT_INITIALIZED;
    if (!emu.devices) return NO_DEVICE;
    initialised = 1;
    return OK;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    if (!version) return INVALID_VALUE;
    *version = (int)DRIVER_VERSION;
    return OK;
}

/* --- devices and contexts --- */

EXPORT CUresult cuDeviceGetCount(int *count) { NEED_INIT(); *count = (int)emu.devices; return OK; }

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    NEED_INIT();
    if (ordinal < 0 || ordinal >= (int)emu.devices) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    NEED_INIT();
    if (device < 0 || device >= (int)emu.devices) return INVALID_DEVICE;
    snprintf(name, (size_t)length, "Emulated device %d", device);
    return OK;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    NEED_INIT();
    if (device < 0 || device >= (int)emu.devices) return INVALID_DEVICE;
    switch (attribute) {
    case 16: *value = 132; return OK; /* MULTIPROCESSOR_COUNT */
    case 75: *value = 9; return OK;   /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *value = 0; return OK;   /* COMPUTE_CAPABILITY_MINOR */
    case 41: *value = 1; return OK;   /* UNIFIED_ADDRESSING */
    case 91: *value = !emu.alias_offset; return OK; /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    case 99: *value = 1; return OK;   /* HOST_REGISTER_SUPPORTED */
    default: *value = 0; return OK;
    }
}

EXPORT CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device) {
    NEED_INIT();
    if (device < 0 || device >= (int)emu.devices) return INVALID_DEVICE;
    contexts[device] = (Context){(uint64_t)device, contexts[device].retained + 1};
    *context = &contexts[device];
    return OK;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    NEED_INIT();
    if (device < 0 || device >= (int)emu.devices || !contexts[device].retained) return INVALID_CONTEXT;
    contexts[device].retained--;
    return OK;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    NEED_INIT();
    if (device < 0 || device >= (int)emu.devices) return INVALID_DEVICE;
    *flags = 0;
    *active = contexts[device].retained > 0;
    return OK;
}

static int is_context(const Context *context) {
    return context >= contexts && context < contexts + 8 && context->retained;
}

EXPORT CUresult cuCtxSetCurrent(Context *context) {
    NEED_INIT();
    if (context && !is_context(context)) return INVALID_CONTEXT;
    current = context;
    return OK;
}

EXPORT CUresult cuCtxGetCurrent(void **context) { NEED_INIT(); *context = current; return OK; }

static __thread Context *below[16];
static __thread int depth;

EXPORT CUresult cuCtxPushCurrent_v2(Context *context) {
    NEED_INIT();
    if (!is_context(context) || depth == 16) return INVALID_CONTEXT;
    below[depth++] = current;
    current = context;
    return OK;
}

EXPORT CUresult cuCtxPopCurrent_v2(void **context) {
    NEED_INIT();
    if (!depth) return INVALID_CONTEXT;
    if (context) *context = current;
    current = below[--depth];
    return OK;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) { NEED_CONTEXT(); *device = (int)current->device; return OK; }

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    NEED_CONTEXT();
    *least = 0;
    *greatest = -5;
    return OK;
}

EXPORT CUresult cuCtxSynchronize(void) { NEED_CONTEXT(); return device_sync(); }

/* --- memory --- */

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
    NEED_CONTEXT();
    return device_alloc(address, nbytes, current->device);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) { NEED_CONTEXT(); return device_free(address); }

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *nbytes, CUdeviceptr address) {
    NEED_CONTEXT();
    ENTER();
    Owner who = owner_of(address);
    if (who.kind == NOBODYS) return leave(NOT_FOUND);
    if (start) *start = who.start;
    if (nbytes) *nbytes = who.nbytes;
    return leave(OK);
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags) {
    NEED_CONTEXT();
    if (flags & ~0xfu) return INVALID_VALUE;
    return host_register((uint64_t)(uintptr_t)address, nbytes, 0);
}

EXPORT CUresult cuMemHostUnregister(void *address) {
    NEED_CONTEXT();
    return host_unregister((uint64_t)(uintptr_t)address);
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *alias, void *address, unsigned flags) {
    NEED_CONTEXT();
    if (flags || !alias) return INVALID_VALUE;
    return host_alias(alias, (uint64_t)(uintptr_t)address);
}

/* Page-locked memory of the driver's own: plain memory that is born registered. */
EXPORT CUresult cuMemHostAlloc(void **address, size_t nbytes, unsigned flags) {
    NEED_CONTEXT();
    if (!nbytes || flags & ~7u) return INVALID_VALUE;
    if (posix_memalign(address, 4096, (nbytes + 4095) / 4096 * 4096)) return OUT_OF_MEMORY;
    int code = host_register((uint64_t)(uintptr_t)*address, nbytes, 0);
    if (code) free(*address);
    return code;
}

EXPORT CUresult cuMemFreeHost(void *address) {
    NEED_CONTEXT();
    int code = host_unregister((uint64_t)(uintptr_t)address);
    if (code) return code == NOT_REGISTERED ? INVALID_VALUE : code;
    free(address);
    return OK;
}

static int pointer_attribute(void *data, int attribute, const Owner *who) {
    switch (attribute) {
    case 2: *(unsigned *)data = who->kind == DEVICE ? 2 : who->kind == HOST ? 1 : 0; return OK; /* MEMORY_TYPE */
    case 9: *(int *)data = who->kind == NOBODYS ? -2 : (int)who->device; return OK;             /* DEVICE_ORDINAL */
    case 11: *(uint64_t *)data = who->start; return OK;                                         /* RANGE_START_ADDR */
    case 12: *(size_t *)data = who->nbytes; return OK;                                          /* RANGE_SIZE */
    default: return INVALID_VALUE;
    }
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **data, CUdeviceptr address) {
    NEED_CONTEXT();
    ENTER();
    Owner who = owner_of(address);
    int code = OK;
    for (unsigned i = 0; i < count && !code; i++) code = pointer_attribute(data[i], attributes[i], &who);
    return leave(code); /* an unknown address is OK here, with zeros */
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    NEED_CONTEXT();
    ENTER();
    Owner who = owner_of(address);
    return leave(who.kind == NOBODYS ? INVALID_VALUE : pointer_attribute(data, attribute, &who));
}

/* --- copies --- */

EXPORT CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, void *stream) {
    NEED_CONTEXT();
    return copy_one(dst, src, nbytes, (uint64_t)(uintptr_t)stream);
}

EXPORT CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t nbytes) {
    NEED_CONTEXT();
    int code = copy_one(dst, src, nbytes, 0);
    return code ? code : stream_sync(0);
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *firsts, size_t number, size_t *fail,
                                   void *handle) {
    size_t ignored;
    if (!fail) fail = &ignored;
    *fail = NONE;
    NEED_CONTEXT();
    ENTER();
    emu.batch_calls++;
    int code;
    *fail = due(count, &code);
    if (code) return leave(code);
    if ((uint64_t)(uintptr_t)handle <= 1) return leave(INVALID_VALUE); /* the default stream, by either name */
    STREAM(stream, (uint64_t)(uintptr_t)handle);
    if (!dsts || !srcs || !sizes || !count || !attributes || !firsts || !number || number > count || firsts[0])
        return leave(INVALID_VALUE);
    int drained = 0;
    for (size_t i = 0; i < number; i++) {
        if (i && (firsts[i] <= firsts[i - 1] || firsts[i] >= count)) return leave(INVALID_VALUE);
        if (attributes[i].srcAccessOrder < 1 || attributes[i].srcAccessOrder > 3) return leave(INVALID_VALUE);
        drained |= attributes[i].srcAccessOrder == 2;
    }
    code = capture_refuses(stream);
    if (code) return leave(code);
    Copy *copies = malloc(count * sizeof *copies);
    for (size_t i = 0; i < count; i++) {
        size_t blame;
        char *src;
        copies[i].size = sizes[i];
        code = locate(dsts[i], sizes[i], i, &copies[i].dst, &drained, &blame);
        if (!code) code = locate(srcs[i], sizes[i], i, &src, &drained, &blame);
        if (code == -1) die("a batch names an address of nobody's: copy", i);
        if (code) {
            *fail = blame;
            free(copies);
            return leave(code);
        }
        copies[i].src = src;
    }
    emu.batch_with_attributes++;
    emu.batch_copies += count;
    if (count > emu.largest_batch) emu.largest_batch = count;
    if (emu.batch_limit && count > emu.batch_limit) die("a batch longer than this driver survives:", count);
    enqueue(stream, copies, count, drained);
    return leave(OK);
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                      CUmemcpyAttributes *attributes, size_t *firsts, size_t number, void *stream) {
    return cuMemcpyBatchAsync(dsts, srcs, sizes, count, attributes, firsts, number, NULL, stream);
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)flags;
    *function = NULL;
    if (status) *status = 0;
    if (version > (int)DRIVER_VERSION) return INVALID_VALUE;
    if (!strcmp(name, "cuMemcpyBatchAsync")) {
        if (version >= 13000) *function = (void *)cuMemcpyBatchAsync_v2;
        else if (version >= 12080) *function = (void *)cuMemcpyBatchAsync;
        else if (status) *status = 2; /* VERSION_NOT_SUFFICIENT */
        return OK;
    }
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    if (!(*function = dlsym(self, versioned))) *function = dlsym(self, name);
    if (!*function && status) *status = 1; /* SYMBOL_NOT_FOUND */
    return *function ? OK : NOT_FOUND;
}

/* --- streams, events, capture --- */

EXPORT CUresult cuStreamCreate(void **stream, unsigned flags) { NEED_CONTEXT(); return stream_create(stream, flags); }

EXPORT CUresult cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)priority;
    NEED_CONTEXT();
    return stream_create(stream, flags);
}

EXPORT CUresult cuStreamDestroy_v2(void *stream) { return stream_destroy((uint64_t)(uintptr_t)stream); }
EXPORT CUresult cuStreamSynchronize(void *stream) { NEED_CONTEXT(); return stream_sync((uint64_t)(uintptr_t)stream); }
EXPORT CUresult cuStreamQuery(void *stream) { NEED_CONTEXT(); return stream_query((uint64_t)(uintptr_t)stream); }

EXPORT CUresult cuStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    (void)flags;
    NEED_CONTEXT();
    return stream_wait_event((uint64_t)(uintptr_t)stream, event);
}

EXPORT CUresult cuLaunchHostFunc(void *stream, void (*call)(void *), void *argument) {
    NEED_CONTEXT();
    return host_function((uint64_t)(uintptr_t)stream, call, argument);
}

EXPORT CUresult cuEventCreate(void **event, unsigned flags) { (void)flags; NEED_CONTEXT(); return event_create(event); }
EXPORT CUresult cuEventDestroy_v2(Event *event) { return event_destroy(event); }

EXPORT CUresult cuEventRecord(Event *event, void *stream) {
    NEED_CONTEXT();
    return event_record(event, (uint64_t)(uintptr_t)stream);
}

EXPORT CUresult cuEventQuery(Event *event) { NEED_INIT(); return event_query(event); }
EXPORT CUresult cuEventSynchronize(Event *event) { NEED_INIT(); return event_sync(event); }

EXPORT CUresult cuStreamBeginCapture_v2(void *stream, int mode) {
    NEED_CONTEXT();
    return capture_begin((uint64_t)(uintptr_t)stream, mode);
}

EXPORT CUresult cuStreamEndCapture(void *stream, void **graph) {
    NEED_CONTEXT();
    return capture_end((uint64_t)(uintptr_t)stream, graph);
}

EXPORT CUresult cuStreamIsCapturing(void *stream, int *status) {
    NEED_CONTEXT();
    return capture_status((uint64_t)(uintptr_t)stream, status);
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode) { NEED_INIT(); return exchange_mode(mode); }

/* --- errors --- */

static const struct { int code; const char *name, *text; } errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
};

EXPORT CUresult cuGetErrorName(CUresult code, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *text = errors[i].name, OK;
    *text = NULL;
    return INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *text = errors[i].text, OK;
    *text = NULL;
    return INVALID_VALUE;
}
