// The state that ranks of the stand-in share: a cell in shared memory for each pair of them, which holds one message.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace stand_in {

constexpr int kMostRanks = 8;
// The longest message. Longer collectives are split.
constexpr size_t kCellBytes = 1 << 20;

struct Cell {
  std::atomic<uint64_t> sent;
  std::atomic<uint64_t> taken;
  uint64_t bytes;
};

// At the start of the shared memory, which is initially zero; the cells' bytes follow.
struct Board {
  std::atomic<int> joined;
  Cell cells[kMostRanks][kMostRanks];  // from, to
};

struct Step;

// One rank's side.
struct Comm {
  int rank = 0;
  int size = 0;
  std::string path;
  Board* board = nullptr;
  size_t mapped = 0;
  // Pinned memory: what is sent, what is received.
  char* out = nullptr;
  char* in = nullptr;
  std::vector<double> factors;
  uint64_t num_calls = 0;
  std::atomic<bool> is_aborted{false};
  std::atomic<bool> has_failed{false};
  std::atomic<bool> is_connecting{false};
  // Steps that wait in the GPU's queue.
  std::atomic<int> num_pending{0};
  // All that were queued: a graph runs them repeatedly.
  std::vector<std::unique_ptr<Step>> steps;

  Comm();
  ~Comm();
  bool join();
  bool are_all_here() const;
  void leave();
};

// Bytes of `out` for a rank, or of `in` from one.
struct Message {
  int rank;
  size_t offset;
  size_t bytes;
};

// How the parts of all ranks, which are contiguous, are reduced to one.
struct Reduction {
  bool is_wanted = false;
  int dtype = 0;
  int op = 0;
  double factor = 1;
  size_t count = 0;
};

// What a host function in the GPU's queue does.
struct Step {
  Comm* comm = nullptr;
  std::vector<Message> sends;
  std::vector<Message> receives;
  Reduction reduction;
  bool never_ends = false;

  // Returns when all of it is done, or the communicator is aborted.
  void run();
};

void reduce(char* parts, int num_parts, const Reduction& how);

// For an `ncclDataType_t`: an element's size, and its value.
size_t element_bytes(int dtype);
double element_value(const void* element, int dtype);

}  // namespace stand_in
