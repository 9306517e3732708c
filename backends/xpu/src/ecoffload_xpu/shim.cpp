// The shim between ctypes and libsycl: loops in C, and a wall that no C++ exception crosses.
//
// It is built with a plain C++ compiler and without SYCL's headers, so that one binary serves every libsycl. The caller
// (sycl.py) looks the functions up by their mangled names in the one libsycl of the process and hands their addresses
// in. What is relied on of libsycl's ABI (the same in libsycl.so.8 and .so.9): queue, context and event are each one
// std::shared_ptr, and the signatures below.
//
// Every entry returns 0, or a code of `enum Code` with a message. Addresses are unsigned words; none is ever signed.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

namespace {

struct Queue { std::shared_ptr<void> impl; };
struct Context { std::shared_ptr<void> impl; };
struct Event { std::shared_ptr<void> impl; };

struct CodeLocation {  // sycl::detail::code_location: where a diagnostic says that a call came from
  const char *file = "ecoffload_xpu";
  const char *function = "ecoffload_xpu";
  unsigned long line = 0, column = 0;
};
const CodeLocation here;

enum Code { ok = 0, threw = 1, out_of_order = 2, missing = 3 };

// A block of host memory with the context that made it, which outlives the queue it was asked through.
struct Held { void *address; Context context; };

// Not exported functions are null. The order is that of `SYMBOLS` in sycl.py.
struct Api {
  bool (*in_order)(const Queue *);
  void (*copy)(Queue, void *, const void *, size_t, const CodeLocation &);
  Event (*barrier)(Queue *, const CodeLocation &);
  Event (*barrier_after)(Queue *, const std::vector<Event> &, const CodeLocation &);
  void (*queue_wait)(Queue *, const CodeLocation &);
  int (*status)(const Event *);
  void (*event_wait)(Event *);
  Context (*context_of)(const Queue *);
  int (*pointer_type_impl)(const void *, void *);                // detail::get_pointer_type(pointer, context_impl &)
  int (*pointer_type)(const void *, const Context &);            // get_pointer_type(pointer, context const &)
  void *(*allocate)(size_t, const Context &, const CodeLocation &);
  void (*release)(void *, const Context &, const CodeLocation &);
  void (*prepare)(const void *, size_t, const Context &);        // prepare_for_device_copy
  void (*unprepare)(const void *, const Context &);              // release_from_device_copy
};

struct Message { char *text; size_t room; };

void say(Message out, const char *what) {
  if (out.text == nullptr || out.room == 0) return;
  std::strncpy(out.text, what, out.room - 1);
  out.text[out.room - 1] = '\0';
}

template <typename Body> int guarded(Message out, Body body) {
  try {
    return body();
  } catch (const std::exception &e) {
    say(out, e.what());
  } catch (...) {
    say(out, "an exception that is no std::exception");
  }
  return threw;
}

constexpr int usm_host = 0;  // sycl::usm::alloc::host

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define MESSAGE char *text, size_t room
#define OUT Message{text, room}

// Bumped with every change of an entry's arguments; sycl.py refuses another number.
EXPORT int ecoffload_xpu_version() { return 1; }

EXPORT int ecoffload_xpu_in_order(const Api *api, const Queue *queue, int *answer, MESSAGE) {
  return guarded(OUT, [&] { *answer = api->in_order(queue); return int(ok); });
}

// Enqueues `count` copies and one barrier behind them; `*event` (to be freed) is the barrier's. `*done` counts the
// copies that were enqueued. After an exception the queue is drained: whoever owns the memory may free it at once.
EXPORT int ecoffload_xpu_copy(const Api *api, Queue *queue, const uint64_t *dst, const uint64_t *src,
                              const uint64_t *size, size_t count, size_t *done, Event **event, MESSAGE) {
  *done = 0;
  *event = nullptr;
  const int code = guarded(OUT, [&] {
    if (!api->in_order(queue)) return int(out_of_order);
    for (size_t i = 0; i < count; ++i) {
      api->copy(*queue, reinterpret_cast<void *>(dst[i]), reinterpret_cast<const void *>(src[i]), size[i], here);
      *done = i + 1;
    }
    *event = new Event(api->barrier(queue, here));
    return int(ok);
  });
  if (code == threw) guarded(Message{nullptr, 0}, [&] { api->queue_wait(queue, here); return int(ok); });
  return code;
}

// Packs `count` host ranges one behind the other at `to`.
EXPORT void ecoffload_xpu_gather(unsigned char *to, const uint64_t *src, const uint64_t *size, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(to, reinterpret_cast<const void *>(src[i]), size[i]);
    to += size[i];
  }
}

// `*answer`: whether the first and the last byte of every range are USM host memory of the queue's context.
EXPORT int ecoffload_xpu_all_usm_host(const Api *api, const Queue *queue, const uint64_t *address,
                                      const uint64_t *size, size_t count, int *answer, MESSAGE) {
  *answer = 0;
  if (!api->pointer_type_impl && !api->pointer_type) {
    say(OUT, "this libsycl exports no get_pointer_type");
    return missing;
  }
  return guarded(OUT, [&] {
    const Context context = api->context_of(queue);
    const auto is_host = [&](uint64_t at) {
      const void *pointer = reinterpret_cast<const void *>(at);
      return (api->pointer_type_impl ? api->pointer_type_impl(pointer, context.impl.get())
                                     : api->pointer_type(pointer, context)) == usm_host;
    };
    for (size_t i = 0; i < count; ++i)
      if (!is_host(address[i]) || !is_host(address[i] + size[i] - 1)) return int(ok);
    *answer = 1;
    return int(ok);
  });
}

EXPORT int ecoffload_xpu_event_status(const Api *api, const Event *event, int *answer, MESSAGE) {
  return guarded(OUT, [&] { *answer = api->status(event); return int(ok); });
}

EXPORT int ecoffload_xpu_event_wait(const Api *api, Event *event, MESSAGE) {
  return guarded(OUT, [&] { api->event_wait(event); return int(ok); });
}

// Later work on `queue` waits for `event`.
EXPORT int ecoffload_xpu_event_block(const Api *api, Queue *queue, const Event *event, MESSAGE) {
  return guarded(OUT, [&] { api->barrier_after(queue, std::vector<Event>{*event}, here); return int(ok); });
}

EXPORT void ecoffload_xpu_event_free(Event *event) {
  guarded(Message{nullptr, 0}, [&] { delete event; return int(ok); });
}

EXPORT int ecoffload_xpu_allocate(const Api *api, const Queue *queue, size_t nbytes, Held **held, void **address,
                                  MESSAGE) {
  return guarded(OUT, [&] {
    auto made = std::make_unique<Held>(Held{nullptr, api->context_of(queue)});
    made->address = api->allocate(nbytes, made->context, here);
    if (made->address == nullptr) {
      say(OUT, "malloc_host returned no memory");
      return int(missing);
    }
    *address = made->address;
    *held = made.release();
    return int(ok);
  });
}

EXPORT int ecoffload_xpu_free(const Api *api, Held *held, MESSAGE) {
  const std::unique_ptr<Held> owner(held);
  return guarded(OUT, [&] { api->release(held->address, held->context, here); return int(ok); });
}

EXPORT int ecoffload_xpu_prepare(const Api *api, const Queue *queue, void *address, size_t nbytes, Held **held,
                                 MESSAGE) {
  if (!api->prepare || !api->unprepare) {
    say(OUT, "this libsycl exports no prepare_for_device_copy");
    return missing;
  }
  return guarded(OUT, [&] {
    auto made = std::make_unique<Held>(Held{address, api->context_of(queue)});
    api->prepare(address, nbytes, made->context);
    *held = made.release();
    return int(ok);
  });
}

EXPORT int ecoffload_xpu_unprepare(const Api *api, Held *held, MESSAGE) {
  const std::unique_ptr<Held> owner(held);
  return guarded(OUT, [&] { api->unprepare(held->address, held->context); return int(ok); });
}
