// A libsycl that copies nothing: it exports the functions that the shim takes from the real one, under their real
// mangled names and with their real argument passing, and writes down what they are called with. Addresses may
// therefore be anything. Events happen when the test says so.
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Copy { uint64_t queue, dst, src, size; };

std::mutex lock;
std::vector<Copy> copies;
std::string journal;
uint64_t recorded = 0, finished = 0, throw_at = ~0ull, host_first = 1, host_last = 0;
int throw_kind = 0, live_events = 0, live_blocks = 0, failed_status = 0;
bool refuse_prepare = false, barrier_throws = false;

void note(const std::string &what) {
  std::lock_guard<std::mutex> hold(lock);
  journal += what + "\n";
}

}  // namespace

namespace sycl {
inline namespace _V1 {

namespace detail {
struct code_location { const char *file, *function; unsigned long line, column; };
struct queue_impl { bool in_order; };
struct context_impl { int number; };
struct event_impl {
  uint64_t number;
  explicit event_impl(uint64_t n) : number(n) { std::lock_guard<std::mutex> hold(lock); ++live_events; }
  ~event_impl() { std::lock_guard<std::mutex> hold(lock); --live_events; }
};
template <typename T> struct is_event_info_desc;
int get_pointer_type(const void *, context_impl &);
}  // namespace detail

namespace info {
enum class event_command_status : int { complete = 0, running = 1, submitted = 2 };
namespace event { struct command_execution_status; }
}  // namespace info
template <> struct detail::is_event_info_desc<info::event::command_execution_status> {
  using return_type = info::event_command_status;
};

class context { public: std::shared_ptr<detail::context_impl> impl; };

class event {
 public:
  std::shared_ptr<detail::event_impl> impl;
  void wait();
  template <typename T> typename detail::is_event_info_desc<T>::return_type get_info() const;
};

class queue {
 public:
  std::shared_ptr<detail::queue_impl> impl;
  bool is_in_order() const;
  event ext_oneapi_submit_barrier(const detail::code_location &);
  event ext_oneapi_submit_barrier(const std::vector<event> &, const detail::code_location &);
  void wait_proxy(const detail::code_location &);
  context get_context() const;
};

const std::shared_ptr<detail::context_impl> the_context = std::make_shared<detail::context_impl>();

bool queue::is_in_order() const { return impl->in_order; }
context queue::get_context() const { return context{the_context}; }
event queue::ext_oneapi_submit_barrier(const detail::code_location &) {
  if (barrier_throws) throw std::runtime_error("UR_RESULT_ERROR_DEVICE_LOST");
  note("barrier");
  return event{std::make_shared<detail::event_impl>(++recorded)};
}
event queue::ext_oneapi_submit_barrier(const std::vector<event> &events, const detail::code_location &) {
  note("barrier on " + std::to_string(reinterpret_cast<uintptr_t>(impl.get())) + " after " +
       std::to_string(events.at(0).impl->number));
  return event{std::make_shared<detail::event_impl>(++recorded)};
}
void queue::wait_proxy(const detail::code_location &) { note("drain"); finished = recorded; }

void event::wait() {
  note("wait " + std::to_string(impl->number));
  if (failed_status) throw std::runtime_error("UR_RESULT_ERROR_DEVICE_LOST");
  if (impl->number > finished) finished = impl->number;
}
template <typename T> typename detail::is_event_info_desc<T>::return_type event::get_info() const {
  if (failed_status) throw std::runtime_error("the copy failed late");
  return impl->number <= finished ? info::event_command_status::complete : info::event_command_status::submitted;
}
template info::event_command_status event::get_info<info::event::command_execution_status>() const;

int detail::get_pointer_type(const void *pointer, context_impl &) {
  const auto at = reinterpret_cast<uint64_t>(pointer);
  return host_first <= at && at <= host_last ? 0 : 3;
}

void *malloc_host(size_t nbytes, const context &, const detail::code_location &) {
  note("allocate " + std::to_string(nbytes));
  std::lock_guard<std::mutex> hold(lock);
  ++live_blocks;
  return ::operator new(nbytes);
}
void free(void *pointer, const context &, const detail::code_location &) {
  std::lock_guard<std::mutex> hold(lock);
  --live_blocks;
  ::operator delete(pointer);
}

namespace ext::oneapi::experimental {
void memcpy(queue q, void *dst, const void *src, size_t size, const detail::code_location &) {
  std::lock_guard<std::mutex> hold(lock);
  if (copies.size() == throw_at) {
    throw_at = ~0ull;
    if (throw_kind == 1) throw 42;
    throw std::runtime_error(throw_kind == 2 ? "UR_RESULT_ERROR_DEVICE_LOST" : "refused by the recorder");
  }
  copies.push_back({reinterpret_cast<uintptr_t>(q.impl.get()), reinterpret_cast<uint64_t>(dst),
                    reinterpret_cast<uint64_t>(src), size});
}
void prepare_for_device_copy(const void *pointer, size_t size, const context &) {
  if (refuse_prepare) throw std::runtime_error("UR_RESULT_ERROR_UNSUPPORTED_FEATURE");
  note("prepare " + std::to_string(reinterpret_cast<uint64_t>(pointer)) + " " + std::to_string(size));
}
void release_from_device_copy(const void *pointer, const context &) {
  note("release " + std::to_string(reinterpret_cast<uint64_t>(pointer)));
}
}  // namespace ext::oneapi::experimental

}  // namespace _V1
}  // namespace sycl

extern "C" {
void *recorder_queue(bool in_order) {
  return new sycl::queue{std::make_shared<sycl::detail::queue_impl>(sycl::detail::queue_impl{in_order})};
}
uint64_t recorder_queue_id(const sycl::queue *queue) { return reinterpret_cast<uintptr_t>(queue->impl.get()); }
void recorder_reset() {
  copies.clear();
  journal.clear();
  finished = recorded;
  throw_at = ~0ull;
  throw_kind = failed_status = 0;
  host_first = 1, host_last = 0;
  refuse_prepare = barrier_throws = false;
}
size_t recorder_count() { return copies.size(); }
void recorder_read(Copy *out) { std::memcpy(out, copies.data(), copies.size() * sizeof(Copy)); }
const char *recorder_journal() { return journal.c_str(); }
void recorder_throw_at(uint64_t copy, int kind) { throw_at = copy; throw_kind = kind; }
void recorder_finish() { finished = recorded; }
void recorder_usm_host(uint64_t first, uint64_t last) { host_first = first; host_last = last; }
void recorder_refuse_prepare() { refuse_prepare = true; }
void recorder_barrier_throws() { barrier_throws = true; }
void recorder_fail_events() { failed_status = 1; }
int recorder_live_events() { return live_events; }
int recorder_live_blocks() { return live_blocks; }
}
