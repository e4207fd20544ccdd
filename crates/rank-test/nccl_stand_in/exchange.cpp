// Messages from rank to rank through cells in shared memory. All sends of a step come before its receives, so that no
// two ranks wait for each other.
#include "exchange.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

namespace stand_in {

namespace {

template <typename Condition>
bool wait(const Comm& comm, Condition is_met) {
  for (int round = 0; !is_met(); ++round) {
    if (comm.is_aborted) return false;
    if (round < 1000) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

char* bytes_of(const Comm& comm, int from, int to) {
  return reinterpret_cast<char*>(comm.board + 1) + (static_cast<size_t>(from) * comm.size + to) * kCellBytes;
}

bool send(const Comm& comm, const Message& message) {
  Cell& cell = comm.board->cells[comm.rank][message.rank];
  if (!wait(comm, [&] { return cell.sent == cell.taken; })) return false;
  std::memcpy(bytes_of(comm, comm.rank, message.rank), comm.out + message.offset, message.bytes);
  cell.bytes = message.bytes;
  ++cell.sent;
  return true;
}

bool receive(const Comm& comm, const Message& message) {
  Cell& cell = comm.board->cells[message.rank][comm.rank];
  // A message of another length never ends, as with NCCL.
  if (!wait(comm, [&] { return cell.sent > cell.taken && cell.bytes == message.bytes; })) return false;
  std::memcpy(comm.in + message.offset, bytes_of(comm, message.rank, comm.rank), message.bytes);
  ++cell.taken;
  return true;
}

}  // namespace

Comm::Comm() = default;
Comm::~Comm() = default;

bool Comm::join() {
  int file = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) return false;
  mapped = sizeof(Board) + static_cast<size_t>(size) * size * kCellBytes;
  void* memory = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(mapped)) == 0) {
    memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  if (memory == MAP_FAILED) return false;
  board = static_cast<Board*>(memory);
  ++board->joined;
  return true;
}

bool Comm::are_all_here() const {
  if (board->joined < size) return false;
  unlink(path.c_str());  // the memory stays as long as a rank maps it
  return true;
}

void Comm::leave() {
  unlink(path.c_str());
  munmap(board, mapped);
}

void Step::run() {
  if (never_ends && !wait(*comm, [] { return false; })) return;
  for (const Message& message : sends) {
    if (!send(*comm, message)) return;
  }
  for (const Message& message : receives) {
    if (!receive(*comm, message)) return;
  }
  if (reduction.is_wanted) reduce(comm->in, comm->size, reduction);
}

}  // namespace stand_in
