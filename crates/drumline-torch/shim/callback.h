// A Rust closure that C++ owns: called any number of times, dropped once.
#pragma once

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

  void operator()() const { raise(closure_.call(closure_.context)); }

 private:
  Closure closure_;
};

}  // namespace drumline
