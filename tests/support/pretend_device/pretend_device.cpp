// A pretend accelerator for torch: two devices whose memory the host cannot touch and whose work runs late.
//
// Memory: every device has an arena that is mapped twice. Tensors get addresses of a mapping without access rights, so
// that a read or write by the host ends the process. Work on a stream goes through the other mapping.
// Work: copies and fills run on a thread per stream, after a delay that tests set. Host memory of a copy that does not
// block is read or written late, pinned or not. All other operators wait for the current stream and run on the CPU.
// Freed memory is overwritten as soon as its streams allow.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr size_t kArenaBytes = size_t{1} << 30;  // pages that nobody touches take no memory
constexpr auto kType = c10::DeviceType::PrivateUse1;

// Milliseconds before each task of the kind; less than zero: until they are set anew.
std::atomic<int> kernel_delay{0}, to_host_delay{0}, to_device_delay{0};
std::atomic<int> device_synchronizations{0};
std::atomic<int> contexts{0};  // bit per device that was made current, or whose memory was used

// --- streams and events ---------------------------------------------------------------------------------------------

// Something that will have happened.
struct Flag {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;

  void set() {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
  bool query() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
};
using FlagPtr = std::shared_ptr<Flag>;

std::atomic<FlagPtr> set_anew{std::make_shared<Flag>()};  // for the tasks that wait until the delays are

// A thread that runs tasks in order.
class Worker {
 public:
  explicit Worker(int device) : device(device) { std::thread(&Worker::run, this).detach(); }

  void queue(std::function<void()> task, int delay = 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (delay < 0) tasks_.emplace_back([flag = set_anew.load()] { flag->wait(); }, 0);
    tasks_.emplace_back(std::move(task), std::max(delay, 0));
    changed_.notify_all();
  }
  FlagPtr record() {
    auto flag = std::make_shared<Flag>();
    queue([flag] { flag->set(); });
    return flag;
  }
  void wait_for(const FlagPtr& flag) {
    queue([flag] { flag->wait(); });
  }

  const int device;

 private:
  void run() {
    for (;;) {
      std::pair<std::function<void()>, int> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (task.second) std::this_thread::sleep_for(std::chrono::milliseconds(task.second));
      task.first();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<std::function<void()>, int>> tasks_;
};

// Workers by stream id; the first ones are the devices' default streams. Never destroyed: their threads are not joined.
struct Workers {
  std::mutex mutex;
  std::deque<Worker> list;
};
Workers& workers() {
  static auto* all = [] {
    auto* made = new Workers;
    for (int device = 0; device < kDevices; ++device) made->list.emplace_back(device);
    return made;
  }();
  return *all;
}
Worker& worker_of(c10::StreamId id) {
  auto& all = workers();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.list.at(static_cast<size_t>(id));
}

thread_local int current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {0, 1};

Worker& current_worker(int device) { return worker_of(current_stream[device]); }
c10::Stream stream_of(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(worker_of(id).device)}, id);
}

struct Event {
  FlagPtr last = [] {
    auto flag = std::make_shared<Flag>();
    flag->done = true;
    return flag;
  }();
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "no such device");
    if (device.index() < 0 || device.index() == current_device) return;
    current_device = device.index();
    contexts |= 1 << current_device;
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(current_stream[device.index() < 0 ? current_device : device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index() < 0 ? current_device : device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto& all = workers();
    std::lock_guard<std::mutex> lock(all.mutex);
    int index = device.index() < 0 ? current_device : device.index();
    contexts |= 1 << index;
    all.list.emplace_back(index);
    auto id = static_cast<c10::StreamId>(all.list.size() - 1);
    return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(index)}, id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return worker_of(stream.id()).record()->query(); }
  void synchronizeStream(const c10::Stream& stream) const override { worker_of(stream.id()).record()->wait(); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    ++device_synchronizations;
    std::vector<FlagPtr> flags;
    {
      auto& all = workers();
      std::lock_guard<std::mutex> lock(all.mutex);
      for (auto& worker : all.list)
        if (worker.device == device) flags.push_back(worker.record());
    }
    for (auto& flag : flags) flag->wait();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->last = worker_of(stream.id()).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) worker_of(stream.id()).wait_for(static_cast<Event*>(event)->last);
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->last->query(); }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->last->wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};
const Guard guard;

// --- memory ---------------------------------------------------------------------------------------------------------

struct Block {
  int device;
  size_t offset, nbytes;
  c10::StreamId stream;  // current when the block was allocated
  std::set<c10::StreamId> others;
};

class Arena {
 public:
  Arena() {
    int file = memfd_create("pretend-device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArenaBytes) == 0, "no memory for the pretend device");
    hidden_ = static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_NONE, MAP_SHARED, file, 0));
    open_ = static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    TORCH_CHECK(hidden_ != MAP_FAILED && open_ != MAP_FAILED, "no address space for the pretend device");
    close(file);
    free_[0] = kArenaBytes;
  }
  bool holds(const void* address) const { return address >= hidden_ && address < hidden_ + kArenaBytes; }
  char* opened(const void* address) const { return open_ + (static_cast<const char*>(address) - hidden_); }
  char* hidden(size_t offset) const { return hidden_ + offset; }

  bool take(size_t nbytes, size_t& offset) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      if (range->second < nbytes) continue;
      offset = range->first;
      size_t rest = range->second - nbytes;
      free_.erase(range);
      if (rest) free_[offset + nbytes] = rest;
      return true;
    }
    return false;
  }
  void give_back(size_t offset, size_t nbytes) {
    std::memset(open_ + offset, 0xDD, nbytes);
    std::lock_guard<std::mutex> lock(mutex_);
    auto range = free_.emplace(offset, nbytes).first;
    auto next = std::next(range);
    if (next != free_.end() && offset + nbytes == next->first) {
      range->second += next->second;
      free_.erase(next);
    }
    if (range != free_.begin()) {
      auto previous = std::prev(range);
      if (previous->first + previous->second == range->first) {
        previous->second += range->second;
        free_.erase(range);
      }
    }
  }

 private:
  char *hidden_, *open_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes
};

Arena& arena(int device) {
  static auto* all = new Arena[kDevices];
  return all[device];
}

// Free a block after the work that its streams have now.
void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  auto& own = worker_of(block->stream);
  for (auto id : block->others) own.wait_for(worker_of(id).record());
  own.queue([device = block->device, offset = block->offset, nbytes = block->nbytes] {
    arena(device).give_back(offset, nbytes);
  });
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  auto* block = static_cast<Block*>(data.get_context());
  if (block && stream.id() != block->stream) block->others.insert(stream.id());
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(kType, static_cast<c10::DeviceIndex>(current_device));
    contexts |= 1 << current_device;
    if (!nbytes) return {nullptr, device};
    nbytes = (nbytes + 511) / 512 * 512;
    size_t offset;
    if (!arena(current_device).take(nbytes, offset)) {
      guard.synchronizeDevice(device.index());
      --device_synchronizations;  // it counts those that others ask for
      TORCH_CHECK(arena(current_device).take(nbytes, offset), "the pretend device is out of memory");
    }
    auto* block = new Block{current_device, offset, nbytes, current_stream[current_device], {}};
    return {arena(current_device).hidden(offset), block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "not by the host"); }
};
DeviceAllocator device_allocator;

// Pinned host memory: ordinary memory that is noted as pinned.
struct PinnedAllocator final : c10::Allocator {
  static std::map<char*, size_t>& ranges() {
    static auto* all = new std::map<char*, size_t>;
    return *all;
  }
  static std::mutex& mutex() {
    static auto* one = new std::mutex;
    return *one;
  }
  static void drop(void* address) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      ranges().erase(static_cast<char*>(address));
    }
    std::free(address);
  }
  static bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex());
    auto next = ranges().upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (next == ranges().begin()) return false;
    auto range = std::prev(next);
    return address < range->first + range->second;
  }
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, c10::Device(c10::kCPU)};
    contexts |= 1 << current_device;  // as cudaHostAlloc
    auto* address = static_cast<char*>(std::aligned_alloc(64, (nbytes + 63) / 64 * 64));
    std::lock_guard<std::mutex> lock(mutex());
    ranges()[address] = nbytes;
    return {address, address, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return contexts >> index & 1; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { guard.setDevice({kType, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return guard.getDevice().index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return guard.exchangeDevice({kType, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    auto before = guard.getDevice().index();
    guard.uncheckedSetDevice({kType, index});
    return before;
  }
  bool isPinnedPtr(const void* address) const override { return PinnedAllocator::holds(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void* address) const override {
    for (int device = 0; device < kDevices; ++device)
      if (arena(device).holds(address)) return {kType, static_cast<c10::DeviceIndex>(device)};
    TORCH_CHECK(false, "not memory of the pretend device");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::impl::VirtualGuardImpl impl(kType);
    auto before = impl.exchangeDevice(storage.device());
    auto data = device_allocator.allocate(nbytes);
    if (storage.nbytes()) {
      auto* from = arena(storage.device().index()).opened(storage.data());
      auto* to = arena(storage.device().index()).opened(data.get());
      size_t length = std::min(nbytes, storage.nbytes());
      current_worker(storage.device().index()).queue([=] { std::memcpy(to, from, length); });
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(nbytes);
    impl.exchangeDevice(before);
  }
};

// --- operators ------------------------------------------------------------------------------------------------------

// Return a CPU tensor that accesses the memory of `tensor`, for a stream's thread.
at::Tensor accessible(const at::Tensor& tensor) {
  void* address = tensor.numel() ? tensor.data_ptr() : nullptr;
  if (address && tensor.device().type() == kType) address = arena(tensor.device().index()).opened(address);
  return at::from_blob(address, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard device_guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard device_guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  bool to_host = target.device().type() != kType;
  auto& worker = current_worker(to_host ? self.device().index() : target.device().index());
  if (!to_host && self.device().type() == kType && self.device() != target.device()) {
    worker.wait_for(current_worker(self.device().index()).record());
  }
  auto from = accessible(self.expand_as(target)), into = accessible(target);
  // Host memory stays until then, as torch's allocator of pinned memory cares for. Device memory does not.
  c10::Storage host = to_host ? target.storage() : self.device().type() == kType ? c10::Storage() : self.storage();
  int delay = to_host ? to_host_delay : self.device().type() == kType ? kernel_delay : to_device_delay;
  worker.queue([from, into, host] { into.copy_(from); }, delay);
  if (!non_blocking && host) worker.record()->wait();
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Tensor& fill_scalar(at::Tensor& self, const at::Scalar& value) {
  auto into = accessible(self);
  current_worker(self.device().index()).queue([into, value] { into.fill_(value); }, kernel_delay);
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill_scalar(self, 0); }

at::Scalar local_scalar_dense(const at::Tensor& self) {
  auto result = at::empty({}, self.options().device(c10::kCPU));
  copy_from(self, result, false);
  return result.item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  guard.recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  impl->generic_set_sizes_contiguous(sizes);
  size_t needed = (impl->storage_offset() + impl->numel()) * self.element_size();
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("fill_.Scalar", fill_scalar);
  m.impl("zero_", zero);
  m.impl("record_stream", record_stream);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}

// --- for the tests, by ctypes ---------------------------------------------------------------------------------------

extern "C" {
void pretend_register() {
  static Hooks hooks;
  c10::SetAllocator(kType, &device_allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
void pretend_delays(int kernel, int to_host, int to_device) {
  kernel_delay = kernel;
  to_host_delay = to_host;
  to_device_delay = to_device;
  set_anew.exchange(std::make_shared<Flag>())->set();
}
int pretend_device_synchronizations() { return device_synchronizations; }
int pretend_contexts() { return contexts; }
int pretend_current_device() { return current_device; }
void pretend_set_device(int index) { guard.setDevice({kType, static_cast<c10::DeviceIndex>(index)}); }
void pretend_forget_contexts() { contexts = 0; }
}
