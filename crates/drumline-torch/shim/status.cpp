// Messages go back to where they were made.
#include "status.h"

extern "C" void drumline_message_free(char* message) { std::free(message); }
