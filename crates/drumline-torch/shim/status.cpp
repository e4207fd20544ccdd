// Frees messages with the allocator that made them.
#include "status.h"

#include "amx.h"

extern "C" void drumline_message_free(char* message) { std::free(message); }

// Every program that uses this shim links this file, and thereby the check of AMX.
extern "C" const int* drumline_amx_is_checked() { return &drumline::amx_is_checked; }
