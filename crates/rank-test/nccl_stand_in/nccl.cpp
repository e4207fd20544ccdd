// A stand-in for NCCL, for tests only: for ranks of one machine, which may share a GPU, with faults on demand. It has
// the functions that drumline-torch loads, and really moves data, slowly:
//
//   GPU ──▶ pinned memory ─▶ cells in shared memory (exchange.h) ─▶ pinned memory ──▶ GPU
//           └── a host function in the stream: like NCCL's kernels, it waits for the other ranks or for an abort
//
// NCCL_STAND_IN_FAULT=KIND:RANK@CALL makes a rank's CALL-th group of calls (from 1)
//   stall    never end on the GPU
//   error    never end, and the communicator report an error when queried
//   refuse   be refused
//   connect  stay in progress, as while a connection is opened
// until the communicator is aborted.
//
// Not here: calls outside a group, two messages from one rank to another in one group, messages longer than a cell.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "exchange.h"

using stand_in::Comm;
using stand_in::kCellBytes;
using stand_in::kMostRanks;
using stand_in::Step;

// Functions of CUDA's runtime, which libtorch has loaded.
extern "C" {
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream);
int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data);
int cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
int cudaFreeHost(void* memory);
}

namespace {

// `ncclResult_t`
enum { kSuccess, kCudaError, kSystemError, kInternalError, kInvalidArgument, kInvalidUsage, kRemoteError, kInProgress };

constexpr int kCopyDefault = 4;  // cudaMemcpyDefault
constexpr int kFirstCustomOp = 5;

struct UniqueId {
  char bytes[128];
};

// GPU memory, and its offset in pinned memory.
struct Copy {
  char* gpu;
  size_t offset;
  size_t bytes;
};

struct Exchange {
  Step step;
  std::vector<Copy> downs;
  std::vector<Copy> ups;
};

// The calls of one thread between group start and end.
struct Group {
  Comm* comm = nullptr;
  void* stream = nullptr;
  std::vector<Exchange> exchanges;
  // All of its sends and receives, which are started together.
  Exchange messages;
};

thread_local bool is_in_group = false;
thread_local Group group;

size_t pinned_bytes() { return kMostRanks * kCellBytes; }

bool is_fault(const Comm& comm, const char* kind) {
  const char* fault = std::getenv("NCCL_STAND_IN_FAULT");
  if (fault == nullptr) return false;
  char name[16];
  int rank = 0;
  unsigned long long call = 0;
  if (std::sscanf(fault, "%15[a-z]:%d@%llu", name, &rank, &call) != 3) {
    std::fprintf(stderr, "NCCL_STAND_IN_FAULT=%s is not KIND:RANK@CALL\n", fault);
    std::abort();
  }
  return std::strcmp(name, kind) == 0 && rank == comm.rank && call == comm.num_calls;
}

void run_step(void* data) {
  Step* step = static_cast<Step*>(data);
  ++step->comm->num_pending;
  step->run();
  --step->comm->num_pending;
}

int queue(const Exchange& exchange, void* stream) {
  Comm* comm = exchange.step.comm;
  auto fits = [](const Copy& copy) { return copy.offset + copy.bytes <= pinned_bytes(); };
  int code = 0;
  for (const Copy& copy : exchange.downs) {
    if (!fits(copy)) return kInvalidArgument;
    code |= cudaMemcpyAsync(comm->out + copy.offset, copy.gpu, copy.bytes, kCopyDefault, stream);
  }
  comm->steps.push_back(std::make_unique<Step>(exchange.step));
  code |= cudaLaunchHostFunc(stream, run_step, comm->steps.back().get());
  for (const Copy& copy : exchange.ups) {
    if (!fits(copy)) return kInvalidArgument;
    code |= cudaMemcpyAsync(copy.gpu, comm->in + copy.offset, copy.bytes, kCopyDefault, stream);
  }
  return code == 0 ? kSuccess : kCudaError;
}

// Fills an exchange for `bytes` of each rank's part, from `start`.
using Fill = std::function<void(Exchange&, size_t start, size_t bytes)>;

int collective(Comm* comm, void* stream, size_t bytes, const Fill& fill) {
  if (!is_in_group) return kInvalidUsage;
  group.comm = comm;
  group.stream = stream;
  for (size_t start = 0; start < bytes; start += kCellBytes) {
    Exchange exchange;
    exchange.step.comm = comm;
    fill(exchange, start, std::min(kCellBytes, bytes - start));
    group.exchanges.push_back(exchange);
  }
  return kSuccess;
}

void send_to_all(Exchange& exchange, size_t bytes) {
  for (int rank = 0; rank < exchange.step.comm->size; ++rank) exchange.step.sends.push_back({rank, 0, bytes});
}

void receive_from_all(Exchange& exchange, size_t bytes) {
  for (int rank = 0; rank < exchange.step.comm->size; ++rank) exchange.step.receives.push_back({rank, rank * bytes, bytes});
}

stand_in::Reduction reduction(const Comm& comm, int dtype, int op, size_t bytes) {
  stand_in::Reduction how;
  how.is_wanted = true;
  how.dtype = dtype;
  how.op = op < kFirstCustomOp ? op : kFirstCustomOp;
  how.factor = op < kFirstCustomOp ? 1 : comm.factors[op - kFirstCustomOp];
  how.count = bytes / stand_in::element_bytes(dtype);
  return how;
}

int message(Comm* comm, void* stream, char* gpu, size_t bytes, int rank, bool is_send) {
  if (!is_in_group) return kInvalidUsage;
  if (bytes > kCellBytes) return kInvalidArgument;
  group.comm = comm;
  group.stream = stream;
  Exchange& exchange = group.messages;
  exchange.step.comm = comm;
  std::vector<stand_in::Message>& messages = is_send ? exchange.step.sends : exchange.step.receives;
  size_t offset = messages.empty() ? 0 : messages.back().offset + messages.back().bytes;
  messages.push_back({rank, offset, bytes});
  (is_send ? exchange.downs : exchange.ups).push_back({gpu, offset, bytes});
  return kSuccess;
}

int start(Group& calls) {
  Comm* comm = calls.comm;
  if (comm == nullptr) return kSuccess;
  ++comm->num_calls;
  if (is_fault(*comm, "refuse")) return kInternalError;
  if (is_fault(*comm, "connect")) {
    comm->is_connecting = true;
    return kInProgress;
  }
  if (calls.messages.step.comm != nullptr) calls.exchanges.push_back(calls.messages);
  bool fails = is_fault(*comm, "error");
  for (Exchange& exchange : calls.exchanges) {
    exchange.step.never_ends = fails || is_fault(*comm, "stall");
    if (int code = queue(exchange, calls.stream)) return code;
  }
  if (fails) comm->has_failed = true;
  return kSuccess;
}

char* at(const void* memory, size_t offset) { return static_cast<char*>(const_cast<void*>(memory)) + offset; }

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22800;
  return kSuccess;
}

int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> made{0};
  std::snprintf(id->bytes, sizeof id->bytes, "/dev/shm/nccl-stand-in-%d-%d", static_cast<int>(getpid()), made++);
  return kSuccess;
}

int ncclCommInitRankConfig(Comm** made, int size, UniqueId id, int rank, void*) {
  if (size > kMostRanks) return kInvalidArgument;
  auto comm = std::make_unique<Comm>();
  comm->rank = rank;
  comm->size = size;
  comm->path = id.bytes;
  void *out = nullptr, *in = nullptr;
  if (cudaHostAlloc(&out, pinned_bytes(), 0) != 0 || cudaHostAlloc(&in, pinned_bytes(), 0) != 0) return kCudaError;
  comm->out = static_cast<char*>(out);
  comm->in = static_cast<char*>(in);
  if (!comm->join()) return kSystemError;
  *made = comm.release();
  return kInProgress;
}

int ncclCommGetAsyncError(Comm* comm, int* code) {
  bool is_busy = comm->is_connecting || !comm->are_all_here();
  *code = comm->has_failed ? kRemoteError : is_busy ? kInProgress : kSuccess;
  return kSuccess;
}

int ncclCommFinalize(Comm*) { return kSuccess; }

int ncclCommDestroy(Comm* comm) {
  comm->leave();
  cudaFreeHost(comm->out);
  cudaFreeHost(comm->in);
  delete comm;
  return kSuccess;
}

// Ends the waiting steps. The memory stays: later copies may still be in progress.
int ncclCommAbort(Comm* comm) {
  comm->is_aborted = true;
  unlink(comm->path.c_str());
  for (int round = 0; comm->num_pending > 0 && round < 3000; ++round) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return kSuccess;
}

const char* ncclGetErrorString(int code) {
  constexpr const char* kMessages[] = {"no error",        "unhandled cuda error", "unhandled system error",
                                    "internal error",  "invalid argument",     "invalid usage",
                                    "remote process exited or there was a network error", "in progress"};
  return code >= 0 && code < 8 ? kMessages[code] : "unknown result code";
}

const char* ncclGetLastError(Comm*) { return ""; }

int ncclGroupStart() {
  if (is_in_group) return kInvalidUsage;
  is_in_group = true;
  group = Group();
  return kSuccess;
}

int ncclGroupEnd() {
  is_in_group = false;
  Group calls = std::move(group);
  group = Group();
  return start(calls);
}

int ncclAllReduce(const void* input, void* output, size_t count, int dtype, int op, Comm* comm, void* stream) {
  return collective(comm, stream, count * stand_in::element_bytes(dtype), [=](Exchange& exchange, size_t start, size_t bytes) {
    send_to_all(exchange, bytes);
    receive_from_all(exchange, bytes);
    exchange.step.reduction = reduction(*comm, dtype, op, bytes);
    exchange.downs = {{at(input, start), 0, bytes}};
    exchange.ups = {{at(output, start), 0, bytes}};
  });
}

int ncclReduce(const void* input, void* output, size_t count, int dtype, int op, int root, Comm* comm, void* stream) {
  return collective(comm, stream, count * stand_in::element_bytes(dtype), [=](Exchange& exchange, size_t start, size_t bytes) {
    exchange.step.sends = {{root, 0, bytes}};
    exchange.downs = {{at(input, start), 0, bytes}};
    if (comm->rank != root) return;
    receive_from_all(exchange, bytes);
    exchange.step.reduction = reduction(*comm, dtype, op, bytes);
    exchange.ups = {{at(output, start), 0, bytes}};
  });
}

int ncclBroadcast(const void* input, void* output, size_t count, int dtype, int root, Comm* comm, void* stream) {
  return collective(comm, stream, count * stand_in::element_bytes(dtype), [=](Exchange& exchange, size_t start, size_t bytes) {
    if (comm->rank == root) {
      send_to_all(exchange, bytes);
      exchange.downs = {{at(input, start), 0, bytes}};
    }
    exchange.step.receives = {{root, 0, bytes}};
    exchange.ups = {{at(output, start), 0, bytes}};
  });
}

int ncclAllGather(const void* input, void* output, size_t count, int dtype, Comm* comm, void* stream) {
  size_t whole = count * stand_in::element_bytes(dtype);
  return collective(comm, stream, whole, [=](Exchange& exchange, size_t start, size_t bytes) {
    send_to_all(exchange, bytes);
    receive_from_all(exchange, bytes);
    exchange.downs = {{at(input, start), 0, bytes}};
    for (int rank = 0; rank < comm->size; ++rank) exchange.ups.push_back({at(output, rank * whole + start), rank * bytes, bytes});
  });
}

int ncclReduceScatter(const void* input, void* output, size_t count, int dtype, int op, Comm* comm, void* stream) {
  size_t whole = count * stand_in::element_bytes(dtype);
  return collective(comm, stream, whole, [=](Exchange& exchange, size_t start, size_t bytes) {
    for (int rank = 0; rank < comm->size; ++rank) {
      exchange.step.sends.push_back({rank, rank * bytes, bytes});
      exchange.downs.push_back({at(input, rank * whole + start), rank * bytes, bytes});
    }
    receive_from_all(exchange, bytes);
    exchange.step.reduction = reduction(*comm, dtype, op, bytes);
    exchange.ups = {{at(output, start), 0, bytes}};
  });
}

int ncclSend(const void* data, size_t count, int dtype, int to, Comm* comm, void* stream) {
  return message(comm, stream, at(data, 0), count * stand_in::element_bytes(dtype), to, true);
}

int ncclRecv(void* data, size_t count, int dtype, int from, Comm* comm, void* stream) {
  return message(comm, stream, at(data, 0), count * stand_in::element_bytes(dtype), from, false);
}

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int, Comm* comm) {
  comm->factors.push_back(stand_in::element_value(scalar, dtype));
  *op = kFirstCustomOp + static_cast<int>(comm->factors.size()) - 1;
  return kSuccess;
}

int ncclRedOpDestroy(int, Comm*) { return kSuccess; }

}  // extern "C"
