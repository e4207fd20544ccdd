// How the shim returns errors: null is success, anything else is a message that the caller owns and must free with
// `drumline_message_free`. No exception leaves the shim.
#pragma once

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

namespace drumline {

using Message = char*;

inline Message own(const char* text) noexcept {
  Message copy = ::strdup(text);
  // Out of memory for a message. A constant is not possible: the caller would free it.
  if (copy == nullptr) std::abort();
  return copy;
}

// Throws the message of a Rust closure, unless it succeeded.
inline void raise(Message message) {
  if (message == nullptr) return;
  const std::string text(message);
  std::free(message);
  throw std::runtime_error(text);
}

// Runs `body`. The text of its exception becomes the message.
template <class Body>
Message guarded(Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& error) {
    return own(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return own(error.what());
  } catch (...) {
    return own("an unknown C++ exception");
  }
}

}  // namespace drumline
