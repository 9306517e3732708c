/* What the emulated libcuda and libamdhip64 share: one imaginary device with memory, streams, events and faults.
 *
 * Memory lives in an arena of ordinary memory, but is named by addresses from `base` on, which nothing else uses (low,
 * or >= 2**63): code that hands out a real address, or the other way round, is found out. Every copy runs late, on a
 * thread of its stream, and reads its source then. A table of allocations and registrations decides what an address
 * belongs to. Knobs, faults and counters are reached by name through emu_set and emu_get, and are set at load time from
 * the environment (ECOFFLOAD_EMULATED="base=0xffffd556b6400000,lateness_us=500").
 *
 * Return codes are those that CUDA and HIP have in common.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define NONE ((size_t)-1)

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901
};

/* --- knobs, faults, counters ------------------------------------------------------------------------------------- */

static struct {
    uint64_t
        /* knobs */
        base, alias_offset, lateness_us, gate_closed, version, devices, batch_limit, attributes_refused, batch_refused,
        /* faults: a code, and where it strikes; 0 is "none" */
        fail_submit, fail_submit_index, fail_late, lost, refuse_registration, registrations_before_refusal, refusals,
        /* counters */
        batch_calls, batch_copies, batch_with_attributes, single_copies, largest_batch, captured, invalidated,
        registrations, allocations, streams, events, finished_copies;
} emu = {.base = 0x100000000000, .lateness_us = 200, .devices = 1};

static const struct { const char *name; uint64_t *word; } emu_words[] = {
#define WORD(name) {#name, &emu.name}
    WORD(base), WORD(alias_offset), WORD(lateness_us), WORD(gate_closed), WORD(version), WORD(devices),
    WORD(batch_limit), WORD(attributes_refused), WORD(batch_refused), WORD(fail_submit), WORD(fail_submit_index), WORD(fail_late), WORD(lost),
    WORD(refuse_registration), WORD(registrations_before_refusal), WORD(refusals), WORD(batch_calls), WORD(batch_copies),
    WORD(batch_with_attributes), WORD(single_copies), WORD(largest_batch), WORD(captured), WORD(invalidated),
    WORD(registrations), WORD(allocations), WORD(streams), WORD(events), WORD(finished_copies),
#undef WORD
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; /* guards everything below and the words above */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pid_t owner;

static uint64_t *emu_word(const char *name) {
    for (size_t i = 0; i < sizeof emu_words / sizeof *emu_words; i++)
        if (!strcmp(emu_words[i].name, name)) return emu_words[i].word;
    fprintf(stderr, "emulated driver: no word named %s\n", name);
    abort();
}

EXPORT void emu_set(const char *name, uint64_t value) {
    pthread_mutex_lock(&mu);
    *emu_word(name) = value;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mu);
}

EXPORT uint64_t emu_get(const char *name) {
    pthread_mutex_lock(&mu);
    uint64_t value = *emu_word(name);
    pthread_mutex_unlock(&mu);
    return value;
}

__attribute__((constructor)) static void emu_load(void) {
    owner = getpid();
    char *text = getenv("ECOFFLOAD_EMULATED"), *rest = NULL;
    if (!text) return;
    text = strdup(text);
    for (char *part = strtok_r(text, ",", &rest); part; part = strtok_r(NULL, ",", &rest)) {
        char *value = strchr(part, '=');
        if (!value) continue;
        *value = 0;
        *emu_word(part) = strtoull(value + 1, NULL, 0);
    }
    free(text);
}

static void die(const char *what, uint64_t value) {
    fprintf(stderr, "emulated driver: %s 0x%llx: a real driver ends the process here\n", what,
            (unsigned long long)value);
    abort();
}

/* --- memory: an arena of allocations, and registered host ranges --------------------------------------------------- */

#define ARENA ((uint64_t)1 << 30) /* reserved, not used: pages appear as they are written */
#define GRAIN 512

typedef struct { uint64_t start, nbytes, device; } Range;
typedef struct { Range *at; size_t count, room; } Table; /* sorted by start, disjoint */

static char *arena;
static Table allocated; /* by offset in the arena */
static Table graveyard; /* freed while work was under way: reused only once the device was idle */
static Table registered; /* by real host address */

static size_t table_find(const Table *table, uint64_t address) { /* index of the range that holds it, or NONE */
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->at[middle].start <= address) low = middle + 1; else high = middle;
    }
    if (!low || address - table->at[low - 1].start >= table->at[low - 1].nbytes) return NONE;
    return low - 1;
}

static void table_add(Table *table, Range range) {
    if (table->count == table->room) {
        table->room = table->room ? 2 * table->room : 64;
        table->at = realloc(table->at, table->room * sizeof(Range));
        if (!table->at) abort();
    }
    size_t i = table->count++;
    for (; i && table->at[i - 1].start > range.start; i--) table->at[i] = table->at[i - 1];
    table->at[i] = range;
}

static void table_drop(Table *table, size_t i) {
    memmove(table->at + i, table->at + i + 1, (--table->count - i) * sizeof(Range));
}

/* --- streams: a queue and a thread each ----------------------------------------------------------------------------- */

typedef struct { char *dst; const char *src; size_t size; } Copy;
typedef struct Stream Stream;
typedef struct Op {
    struct Op *next;
    enum { COPY, WAIT, CALL, DELAY } kind;
    Copy *copies;
    size_t count;
    Stream *other;
    uint64_t ticket;
    void (*call)(void *);
    void *argument;
    uint64_t us;
} Op;
struct Stream {
    uint64_t magic;
    Stream *next; /* in the list of all */
    Op *head, **tail;
    uint64_t submitted, completed; /* tickets */
    int blocking, started, closed, capturing; /* capturing: 0, 1 active, 2 invalidated */
    int capture_mode;
    pthread_t capturer;
};
typedef struct { uint64_t magic; Stream *stream; uint64_t ticket; } Event;

#define STREAM_MAGIC 0x5354524541404d31u
#define EVENT_MAGIC 0x4556454e54404d31u

static Stream *all_streams;
static Stream legacy = {.magic = STREAM_MAGIC, .blocking = 1};
static __thread Stream *per_thread;
static __thread int capture_mode; /* of the calling thread: 0 global, 1 thread-local, 2 relaxed */

static Stream *stream_new(int blocking) {
    for (Stream **link = &all_streams; *link;) /* forget those that have ended; events may still point at them */
        if ((*link)->closed && (*link)->completed == (*link)->submitted) *link = (*link)->next;
        else link = &(*link)->next;
    Stream *stream = calloc(1, sizeof *stream);
    stream->magic = STREAM_MAGIC;
    stream->tail = &stream->head;
    stream->blocking = blocking;
    stream->next = all_streams;
    all_streams = stream;
    return stream;
}

static Stream *stream_of(uint64_t handle) { /* NULL: no stream */
    if (handle <= 1) {
        if (!legacy.tail) legacy.tail = &legacy.head;
        return &legacy;
    }
    if (handle == 2) {
        if (!per_thread) per_thread = stream_new(1);
        return per_thread;
    }
    for (Stream *stream = all_streams; stream; stream = stream->next)
        if ((uint64_t)(uintptr_t)stream == handle && !stream->closed) return stream;
    return NULL;
}

static void pause_us(uint64_t us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&time, &time) && errno == EINTR) {}
}

static void *stream_run(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&mu);
    for (;;) {
        while (!stream->head && !stream->closed) pthread_cond_wait(&changed, &mu);
        Op *op = stream->head;
        if (!op) break;
        uint64_t late = op->kind == COPY ? emu.lateness_us : op->kind == DELAY ? op->us : 0;
        if (late) {
            pthread_mutex_unlock(&mu);
            pause_us(late);
            pthread_mutex_lock(&mu);
        }
        if (op->kind == WAIT)
            while (op->other->completed < op->ticket) pthread_cond_wait(&changed, &mu);
        if (op->kind == COPY) {
            while (emu.gate_closed) pthread_cond_wait(&changed, &mu);
            if (emu.fail_late) {
                emu.lost = emu.fail_late;
                emu.fail_late = 0;
            }
        }
        int lost = emu.lost != 0;
        pthread_mutex_unlock(&mu);
        if (op->kind == COPY && !lost)
            for (size_t i = 0; i < op->count; i++) memmove(op->copies[i].dst, op->copies[i].src, op->copies[i].size);
        if (op->kind == CALL && !lost) op->call(op->argument);
        pthread_mutex_lock(&mu);
        if (op->kind == COPY && !lost) emu.finished_copies += op->count;
        stream->head = op->next;
        if (!stream->head) stream->tail = &stream->head;
        stream->completed++;
        free(op->copies);
        free(op);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&mu);
    return NULL;
}

static void op_push(Stream *stream, Op op) {
    if (!stream->started) {
        pthread_attr_t attributes;
        pthread_t thread;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 256 << 10);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        if (pthread_create(&thread, &attributes, stream_run, stream)) abort();
        pthread_attr_destroy(&attributes);
        stream->started = 1;
    }
    Op *made = malloc(sizeof *made);
    *made = op;
    made->next = NULL;
    *stream->tail = made;
    stream->tail = &made->next;
    stream->submitted++;
    pthread_cond_broadcast(&changed);
}

static void stream_wait(Stream *stream, Stream *other, uint64_t ticket) {
    if (other->completed < ticket) op_push(stream, (Op){.kind = WAIT, .other = other, .ticket = ticket});
}

static void stream_push(Stream *stream, Op op) { /* with the ordering that the legacy default stream imposes */
    if (stream == &legacy)
        for (Stream *other = all_streams; other; other = other->next) {
            if (other->blocking && other != stream) stream_wait(stream, other, other->submitted);
        }
    else if (stream->blocking)
        stream_wait(stream, &legacy, legacy.submitted);
    op_push(stream, op);
}

static int device_idle(void) {
    if (legacy.completed < legacy.submitted) return 0;
    for (Stream *stream = all_streams; stream; stream = stream->next)
        if (stream->completed < stream->submitted) return 0;
    return 1;
}

/* --- what every call asks first -------------------------------------------------------------------------------------- */

static int enter(void) { /* locks on OK */
    if (getpid() != owner) return NOT_INITIALIZED; /* a fork: threads and contexts are the parent's */
    pthread_mutex_lock(&mu);
    if (emu.lost) {
        int code = (int)emu.lost;
        pthread_mutex_unlock(&mu);
        return code;
    }
    return OK;
}

static int leave(int code) {
    pthread_mutex_unlock(&mu);
    return code;
}

/* A call that a capture under way forbids to this thread, unless it said "relaxed"; it ruins the capture. */
static int unsafe_call(void) {
    int code = OK;
    for (Stream *stream = all_streams; stream; stream = stream->next) {
        if (!stream->capturing || stream->capture_mode == 2 || capture_mode == 2) continue;
        int own = pthread_equal(stream->capturer, pthread_self());
        if (!own && (stream->capture_mode == 1 || capture_mode == 1)) continue;
        stream->capturing = 2;
        emu.invalidated++;
        code = CAPTURE_UNSUPPORTED;
    }
    return code;
}

#define ENTER() do { int code_ = enter(); if (code_) return code_; } while (0)
#define STREAM(name, handle) Stream *name = stream_of(handle); if (!name) return leave(INVALID_HANDLE)

/* --- calls ----------------------------------------------------------------------------------------------------------- */

static int device_alloc(uint64_t *address, uint64_t nbytes, uint64_t device) {
    ENTER();
    int code = unsafe_call();
    if (code || !nbytes || !address) return leave(code ? code : INVALID_VALUE);
    if (!arena) {
        arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (arena == MAP_FAILED) abort();
    }
    if (device_idle())
        while (graveyard.count) {
            size_t i = table_find(&allocated, graveyard.at[graveyard.count - 1].start);
            table_drop(&allocated, i);
            graveyard.count--;
        }
    uint64_t start = 0, room = (nbytes + GRAIN - 1) / GRAIN * GRAIN;
    for (size_t i = 0; i < allocated.count && allocated.at[i].start - start < room; i++)
        start = (allocated.at[i].start + allocated.at[i].nbytes + GRAIN - 1) / GRAIN * GRAIN;
    if (room < nbytes || room > ARENA || start > ARENA - room) return leave(OUT_OF_MEMORY);
    table_add(&allocated, (Range){start, nbytes, device});
    memset(arena + start, 0xa5, nbytes); /* never zeros by luck */
    emu.allocations++;
    *address = emu.base + start;
    return leave(OK);
}

static int device_free(uint64_t address) {
    if (getpid() != owner) return NOT_INITIALIZED;
    pthread_mutex_lock(&mu); /* allowed on a lost device: nothing reads the memory again */
    uint64_t offset = address - emu.base;
    size_t i = table_find(&allocated, offset);
    if (i == NONE || allocated.at[i].start != offset || table_find(&graveyard, offset) != NONE)
        return leave(INVALID_VALUE);
    if (device_idle()) table_drop(&allocated, i); else table_add(&graveyard, allocated.at[i]);
    emu.allocations--;
    return leave(OK);
}

/* Real address behind a fake one that is inside an allocation; NULL otherwise. For the tests' tensors. */
EXPORT void *emu_real(uint64_t address) {
    pthread_mutex_lock(&mu);
    size_t i = table_find(&allocated, address - emu.base);
    void *real = i == NONE ? NULL : arena + (address - emu.base);
    pthread_mutex_unlock(&mu);
    return real;
}

/* The device's name of a real address in the arena; 0 if it is elsewhere. */
EXPORT uint64_t emu_fake(const char *real) {
    return arena && real >= arena && real < arena + ARENA ? emu.base + (uint64_t)(real - arena) : 0;
}

static int host_register(uint64_t address, uint64_t nbytes, int twice) {
    ENTER();
    int code = unsafe_call();
    if (code || !address || !nbytes || address + nbytes < address) return leave(code ? code : INVALID_VALUE);
    if (emu.refuse_registration) {
        code = (int)emu.refuse_registration;
        if (!emu.registrations_before_refusal) {
            if (emu.refusals && !--emu.refusals) emu.refuse_registration = 0; /* refusals 0: for good */
            return leave(code);
        }
        emu.registrations_before_refusal--;
    }
    for (size_t i = 0; i < registered.count; i++) {
        Range *range = &registered.at[i];
        if (address < range->start + range->nbytes && range->start < address + nbytes)
            return leave(twice ? OK : ALREADY_REGISTERED);
    }
    table_add(&registered, (Range){address, nbytes, 0});
    emu.registrations++;
    return leave(OK);
}

static int host_unregister(uint64_t address) {
    ENTER();
    int code = unsafe_call();
    if (code) return leave(code);
    while (!device_idle() && !emu.lost) pthread_cond_wait(&changed, &mu); /* as drivers do: copies may still use it */
    size_t i = table_find(&registered, address);
    if (i == NONE || registered.at[i].start != address) return leave(NOT_REGISTERED);
    table_drop(&registered, i);
    emu.registrations--;
    return leave(OK);
}

static int host_alias(uint64_t *alias, uint64_t address) {
    ENTER();
    if (table_find(&registered, address) == NONE) return leave(INVALID_VALUE);
    *alias = address + emu.alias_offset;
    return leave(OK);
}

typedef struct { enum { NOBODYS, HOST, DEVICE } kind; uint64_t start, nbytes, device; } Owner;

static Owner owner_of(uint64_t address) {
    size_t i = table_find(&allocated, address - emu.base);
    if (i != NONE && table_find(&graveyard, address - emu.base) == NONE)
        return (Owner){DEVICE, emu.base + allocated.at[i].start, allocated.at[i].nbytes, allocated.at[i].device};
    i = table_find(&registered, address);
    if (i != NONE) return (Owner){HOST, registered.at[i].start, registered.at[i].nbytes, 0};
    return (Owner){NOBODYS, 0, 0, 0};
}

static int readable(uint64_t address, uint64_t size) { /* of this process's plain memory: first and last byte */
    char byte;
    for (int end = 0; end < 2; end++) {
        struct iovec to = {&byte, 1}, from = {(void *)(uintptr_t)(address + (end ? size - 1 : 0)), 1};
        if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != 1) return 0;
    }
    return 1;
}

/* Where `address` really is: into *real. OK; INVALID_VALUE with *blame (a range past its allocation names the copy, one
 * past its registration names none); NOBODYS memory gives -1. *pageable: plain host memory. */
static int locate(uint64_t address, uint64_t size, size_t index, char **real, int *pageable, size_t *blame) {
    *blame = index;
    if (!address || !size || address + (size - 1) < address) return INVALID_VALUE;
    Owner who = owner_of(address);
    if (who.kind == NOBODYS && emu.alias_offset) {
        who = owner_of(address - emu.alias_offset);
        if (who.kind == HOST) address -= emu.alias_offset; else who.kind = NOBODYS;
    }
    if (who.kind != NOBODYS) {
        if (size > who.nbytes - (address - who.start)) {
            if (who.kind == HOST) *blame = NONE;
            return INVALID_VALUE;
        }
        *real = who.kind == DEVICE ? arena + (address - emu.base) : (char *)(uintptr_t)address;
        return OK;
    }
    if (!readable(address, size)) return -1;
    *pageable = 1;
    *real = (char *)(uintptr_t)address;
    return OK;
}

static void drain(Stream *stream) {
    uint64_t ticket = stream->submitted;
    while (stream->completed < ticket && !emu.lost) pthread_cond_wait(&changed, &mu);
}

/* Enqueue located copies (takes the array). Plain host memory on either side makes the call wait. */
static void enqueue(Stream *stream, Copy *copies, size_t count, int wait) {
    if (!count) {
        free(copies);
        return;
    }
    stream_push(stream, (Op){.kind = COPY, .copies = copies, .count = count});
    if (wait) drain(stream);
}

static int capture_refuses(Stream *stream) { /* a batch has no place in a graph */
    if (!stream->capturing) return OK;
    stream->capturing = 2;
    emu.invalidated++;
    return CAPTURE_UNSUPPORTED;
}

/* The copy among the next `count` that a test wants refused, NONE if it is not due; *code. fail_submit_index counts from
 * the next copy submitted; -1: the next call, blaming no one copy. */
static size_t due(size_t count, int *code) {
    *code = OK;
    if (!emu.fail_submit) return NONE;
    if (emu.fail_submit_index != UINT64_MAX && emu.fail_submit_index >= count) {
        emu.fail_submit_index -= count;
        return NONE;
    }
    size_t index = (size_t)emu.fail_submit_index;
    *code = (int)emu.fail_submit;
    emu.fail_submit = emu.fail_submit_index = 0;
    return index;
}

static int copy_one(uint64_t dst, uint64_t src, uint64_t size, uint64_t handle) {
    ENTER();
    STREAM(stream, handle);
    emu.single_copies++;
    int code;
    due(1, &code);
    if (code || !size) return leave(code);
    Copy copy = {.size = size};
    int pageable = 0;
    size_t blame;
    char *real;
    code = locate(dst, size, 0, &copy.dst, &pageable, &blame);
    if (!code) code = locate(src, size, 0, &real, &pageable, &blame);
    if (code == -1) {
#ifdef FOREIGN_ENDS_PROCESS
        die("a copy with an address of nobody's, to", dst);
#endif
        code = INVALID_VALUE;
    }
    if (code) return leave(code);
    if (stream->capturing) {
        emu.captured++;
        return leave(OK);
    }
    copy.src = real;
    Copy *copies = malloc(sizeof copy);
    *copies = copy;
    enqueue(stream, copies, 1, pageable);
    return leave(OK);
}

static int stream_create(void **stream, unsigned flags) {
    ENTER();
    *stream = stream_new(!(flags & 1));
    emu.streams++;
    return leave(OK);
}

static int stream_destroy(uint64_t handle) {
    if (getpid() != owner) return NOT_INITIALIZED;
    pthread_mutex_lock(&mu);
    Stream *stream = handle > 2 ? stream_of(handle) : NULL;
    if (!stream) return leave(INVALID_HANDLE);
    stream->closed = 1; /* its thread ends when its queue is empty; the record stays, events may point at it */
    emu.streams--;
    pthread_cond_broadcast(&changed);
    return leave(OK);
}

static int stream_sync(uint64_t handle) {
    ENTER();
    int code = unsafe_call();
    if (code) return leave(code);
    STREAM(stream, handle);
    drain(stream);
    return leave((int)emu.lost);
}

static int stream_query(uint64_t handle) {
    ENTER();
    int code = unsafe_call();
    if (code) return leave(code);
    STREAM(stream, handle);
    return leave(stream->completed < stream->submitted ? NOT_READY : OK);
}

static int device_sync(void) {
    ENTER();
    int code = unsafe_call();
    if (code) return leave(code);
    while (!device_idle() && !emu.lost) pthread_cond_wait(&changed, &mu);
    return leave((int)emu.lost);
}

static int event_create(void **event) {
    ENTER();
    Event *made = calloc(1, sizeof *made);
    made->magic = EVENT_MAGIC;
    emu.events++;
    *event = made;
    return leave(OK);
}

static int event_destroy(Event *event) {
    if (getpid() != owner) return NOT_INITIALIZED;
    if (!event || event->magic != EVENT_MAGIC) return INVALID_HANDLE;
    pthread_mutex_lock(&mu);
    event->magic = 0;
    emu.events--;
    free(event);
    return leave(OK);
}

static int event_record(Event *event, uint64_t handle) {
    ENTER();
    STREAM(stream, handle);
    if (!event || event->magic != EVENT_MAGIC) return leave(INVALID_HANDLE);
    if (stream->capturing) return leave(OK);
    event->stream = stream;
    event->ticket = stream->submitted;
    if (stream == &legacy) { /* everything before it on blocking streams too */
        stream_push(stream, (Op){.kind = DELAY});
        event->ticket = stream->submitted;
    }
    return leave(OK);
}

static int event_query(Event *event) {
    ENTER();
    int code = unsafe_call();
    if (code) return leave(code);
    if (!event || event->magic != EVENT_MAGIC) return leave(INVALID_HANDLE);
    return leave(event->stream && event->stream->completed < event->ticket ? NOT_READY : OK);
}

static int event_sync(Event *event) {
    ENTER();
    int code = unsafe_call();
    if (code) return leave(code);
    if (!event || event->magic != EVENT_MAGIC) return leave(INVALID_HANDLE);
    Stream *stream = event->stream;
    uint64_t ticket = event->ticket;
    while (stream && stream->completed < ticket && !emu.lost) pthread_cond_wait(&changed, &mu);
    return leave((int)emu.lost);
}

static int stream_wait_event(uint64_t handle, Event *event) {
    ENTER();
    STREAM(stream, handle);
    if (!event || event->magic != EVENT_MAGIC) return leave(INVALID_HANDLE);
    if (event->stream && event->stream != stream) stream_wait(stream, event->stream, event->ticket);
    return leave(OK);
}

static int host_function(uint64_t handle, void (*call)(void *), void *argument) {
    ENTER();
    STREAM(stream, handle);
    stream_push(stream, (Op){.kind = CALL, .call = call, .argument = argument});
    return leave(OK);
}

/* Keep a stream busy. */
EXPORT int emu_delay(uint64_t handle, uint64_t us) {
    ENTER();
    STREAM(stream, handle);
    stream_push(stream, (Op){.kind = DELAY, .us = us});
    return leave(OK);
}

static int capture_begin(uint64_t handle, int mode) {
    ENTER();
    STREAM(stream, handle);
    if (stream == &legacy || stream->capturing || mode < 0 || mode > 2)
        return leave(stream == &legacy ? CAPTURE_UNSUPPORTED : INVALID_VALUE);
    stream->capturing = 1;
    stream->capture_mode = mode;
    stream->capturer = pthread_self();
    return leave(OK);
}

static int capture_end(uint64_t handle, void **graph) {
    ENTER();
    STREAM(stream, handle);
    if (!stream->capturing) return leave(INVALID_VALUE);
    int code = stream->capturing == 2 ? CAPTURE_INVALIDATED : OK;
    stream->capturing = 0;
    *graph = NULL;
    return leave(code);
}

static int capture_status(uint64_t handle, int *status) {
    ENTER();
    STREAM(stream, handle);
    *status = stream->capturing;
    return leave(OK);
}

static int exchange_mode(int *mode) {
    int old = capture_mode;
    if (!mode || *mode < 0 || *mode > 2) return INVALID_VALUE;
    capture_mode = *mode;
    *mode = old;
    return OK;
}
