// A Rust closure that C++ owns: called any number of times, dropped once.
#pragma once

#include <stdexcept>
#include <string>

#include "status.h"

namespace drumline {

// `call` returns null or a message to free; it never unwinds.
struct Closure {
  void* context;
  Message (*call)(void* context);
  void (*drop)(void* context);
};

class Callback {
 public:
  explicit Callback(Closure closure) : closure_(closure) {}
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;
  ~Callback() { closure_.drop(closure_.context); }

  void operator()() const {
    if (Message message = closure_.call(closure_.context)) {
      std::string text(message);
      std::free(message);
      throw std::runtime_error(text);
    }
  }

 private:
  Closure closure_;
};

}  // namespace drumline
