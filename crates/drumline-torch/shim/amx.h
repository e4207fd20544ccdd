// Makes the linker keep the check of AMX, which runs before main.
#pragma once

namespace drumline {
extern const int amx_is_checked;
}
