// Tensors whose memory can be exchanged, and a callback before each operation that uses one of them.
//
// Before an operation, libtorch calls every observer with its inputs. This observer looks up their storages, so that views and
// tensors that autograd has saved count as the tensor that they belong to.
#include "usage.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "list.h"
#include "status.h"

using drumline::guarded;
using drumline::Message;

namespace {

// A Rust closure: the numbers of the tensors that an operation uses, and its name.
struct Listener {
  void* context;
  void (*used)(void* context, const size_t* tensors, size_t len, const char* operation);
  void (*drop)(void* context);
};

struct Watch {
  explicit Watch(Listener listener) : listener(listener) {}
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() { listener.drop(listener.context); }

  Listener listener;
  // Uses of this tensor alone are not reported.
  std::atomic<size_t> unreported{SIZE_MAX};
};

struct Watched {
  std::shared_ptr<Watch> watch;
  size_t number;
};

std::shared_mutex mutex;
std::unordered_map<const c10::StorageImpl*, Watched> watched;
std::atomic<bool> has_watched{false};
at::CallbackHandle observer = at::INVALID_CALLBACK_HANDLE;

// Operations of the listener are not reported to it.
thread_local bool is_listening = false;

// The watched tensors among some inputs, for each watch in the order in which they come.
struct Uses {
  struct Of {
    std::shared_ptr<Watch> watch;
    std::vector<size_t> numbers;
  };
  std::vector<Of> all;

  void add(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    const auto found = watched.find(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    if (found == watched.end()) return;
    const auto& [watch, number] = found->second;
    auto of = std::find_if(all.begin(), all.end(), [&](const Of& other) { return other.watch == watch; });
    if (of == all.end()) of = all.insert(all.end(), Of{watch, {}});
    if (std::find(of->numbers.begin(), of->numbers.end(), number) == of->numbers.end()) of->numbers.push_back(number);
  }

  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) add(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor) add(*tensor);
      }
    }
  }

  // Without the lock: the listener may wait for other ranks.
  void report(const char* operation) const {
    for (const auto& [watch, numbers] : all) {
      if (numbers.size() == 1 && watch->unreported.load() == numbers[0]) continue;
      is_listening = true;
      watch->listener.used(watch->listener.context, numbers.data(), numbers.size(), operation);
      is_listening = false;
    }
  }
};

std::unique_ptr<at::ObserverContext> before_operation(const at::RecordFunction& operation) {
  if (is_listening) return nullptr;
  Uses uses;
  {
    std::shared_lock lock(mutex);
    for (const c10::IValue& input : operation.inputs()) uses.add(input);
  }
  uses.report(operation.name());
  return nullptr;
}

}  // namespace

namespace drumline {

bool is_watched(const at::Tensor& tensor) {
  if (!has_watched || !tensor.has_storage()) return false;
  std::shared_lock lock(mutex);
  return watched.count(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()) > 0;
}

}  // namespace drumline

extern "C" {

// A one-dimensional tensor of `like`'s type and device at an address that the caller has reserved.
Message drumline_movable_new(const at::Tensor* like, int64_t len, void* address, at::Tensor** out) {
  return guarded([&] {
    at::NoGradGuard no_grad;
    const auto bytes = static_cast<size_t>(len) * like->element_size();
    const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(address, like->device()), nullptr, false);
    *out = new at::Tensor(at::empty({0}, like->options()).set_(storage, 0, {len}, {1}));
  });
}

// All tensors over the storage of `movable` have their elements at `address` from now on. Nothing is copied.
Message drumline_movable_point(const at::Tensor* movable, void* address) {
  return guarded([&] {
    movable->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(address, movable->device()));
  });
}

// Calls the listener before each operation that uses one of these tensors.
Message drumline_usage_watch(drumline::List tensors, Listener listener, std::shared_ptr<Watch>** out) {
  return guarded([&] {
    auto watch = std::make_shared<Watch>(listener);
    std::unique_lock lock(mutex);
    for (size_t i = 0; i < tensors.len; ++i) {
      watched[tensors.items[i]->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()] = {watch, i};
    }
    has_watched = !watched.empty();
    if (observer == at::INVALID_CALLBACK_HANDLE) {
      auto callback = at::RecordFunctionCallback(before_operation).needsInputs(true).scopes({at::RecordScope::FUNCTION});
      observer = at::addGlobalCallback(callback);
    }
    *out = new std::shared_ptr<Watch>(watch);
  });
}

void drumline_usage_unwatch(std::shared_ptr<Watch>* watch) {
  {
    std::unique_lock lock(mutex);
    for (auto it = watched.begin(); it != watched.end();) it = it->second.watch == *watch ? watched.erase(it) : std::next(it);
    has_watched = !watched.empty();
    if (watched.empty() && observer != at::INVALID_CALLBACK_HANDLE) {
      at::removeCallback(observer);
      observer = at::INVALID_CALLBACK_HANDLE;
    }
  }
  delete watch;
}

void drumline_usage_unreported(const std::shared_ptr<Watch>* watch, size_t number) { (*watch)->unreported.store(number); }

// Reports a use that is no operation of libtorch: a kernel of ours that takes the address.
void drumline_usage_report(const at::Tensor* tensor, const char* operation) {
  if (is_listening || !has_watched) return;
  Uses uses;
  {
    std::shared_lock lock(mutex);
    uses.add(*tensor);
  }
  uses.report(operation);
}

}  // extern "C"
