// Disables AMX in oneDNN if the CPU only claims to have it.
//
// Some virtual machines announce AMX and let the kernel grant it, but the first tile instruction ends the process with
// SIGILL or SIGSEGV. Every matrix product in bf16 on the CPU would do so, in PyTorch as well. So a child process tries
// one before main. If it dies, ONEDNN_MAX_CPU_ISA selects the next best instructions, unless the user has set that
// variable.
#include "amx.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>

namespace {

const long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
const long tile_data = 18;               // XFEATURE_XTILEDATA

bool announces_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & (1u << 24)) != 0;
}

__attribute__((target("amx-tile"))) void use_a_tile() {
  alignas(64) uint8_t shape[64] = {};
  shape[0] = 1;    // palette
  shape[16] = 64;  // bytes in a row of tile 0
  shape[48] = 16;  // its rows
  _tile_loadconfig(shape);
  _tile_zero(0);
  _tile_release();
}

// Tries in a child process, which may die.
bool amx_works() {
  pid_t child = fork();
  if (child < 0) return true;
  if (child == 0) {
    prctl(PR_SET_DUMPABLE, 0);  // no core file
    for (int number : {SIGILL, SIGSEGV, SIGBUS}) signal(number, SIG_DFL);
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) _exit(0);  // oneDNN asks, too
    use_a_tile();
    _exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return true;
  }
  return !WIFSIGNALED(status);
}

__attribute__((constructor)) void check_amx() {
  if (getenv("ONEDNN_MAX_CPU_ISA") != nullptr || getenv("DNNL_MAX_CPU_ISA") != nullptr) return;
  if (announces_amx() && !amx_works()) setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", 0);
}

}  // namespace
#endif

namespace drumline {
const int amx_is_checked = 1;
}
