// Where a step's time goes on a GPU: the kernels of the last steps, by name, longest first. CUDA loads it by itself:
//
//   g++ -O2 -std=c++17 -shared -fPIC kernel_times.cpp -I CUDA/include -I TOOLKIT/include -L CUDA/lib -l:libcupti.so.13 -o kernel_times.so
//   CUDA_INJECTION64_PATH=$PWD/kernel_times.so MARK=nll_loss_forward drumline-bench gpu --model resnet50 --mode graph …
//
// CUDA is the folder `nvidia/cu13` that pip's packages nvidia-cuda-cupti and nvidia-cuda-runtime share, TOOLKIT nvcc's. MARK is part of the name of a kernel that each
// step has once (row_losses for a GPT); STEPS says how many steps are looked at (10), SHOWN how many kernels are listed (45). The table is Markdown, in the
// file that TABLE names, or on stderr. `gpu-pack/run --profile` does all this.
#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Run {
  uint64_t start, end;
  int name;
};

std::mutex lock;
std::map<std::string, int> numbers;
std::vector<std::string> names;
std::vector<Run> runs;

void note(const std::string& name, uint64_t start, uint64_t end) {
  std::lock_guard<std::mutex> guard(lock);
  auto [place, is_new] = numbers.emplace(name, static_cast<int>(names.size()));
  if (is_new) names.push_back(name);
  runs.push_back({start, end, place->second});
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* most) {
  *size = 8 << 20;
  *buffer = static_cast<uint8_t*>(aligned_alloc(8, *size));
  *most = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t filled) {
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, filled, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      auto* kernel = reinterpret_cast<CUpti_ActivityKernel9*>(record);
      note(kernel->name, kernel->start, kernel->end);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      auto* copy = reinterpret_cast<CUpti_ActivityMemcpy5*>(record);
      note("copy of memory", copy->start, copy->end);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      auto* fill = reinterpret_cast<CUpti_ActivityMemset4*>(record);
      note("filling of memory", fill->start, fill->end);
    }
  }
  free(buffer);
}

int number(const char* variable, int otherwise) {
  const char* text = getenv(variable);
  return text ? atoi(text) : otherwise;
}

// From the mark before the last steps to the last one: [first, end) of the sorted runs, and how many steps those are.
struct Window {
  size_t first, end;
  double steps;
  bool is_found;
};

Window last_steps() {
  std::vector<size_t> marks;
  const char* mark = getenv("MARK");
  for (size_t i = 0; i < runs.size(); ++i) {
    if (mark && strstr(names[runs[i].name].c_str(), mark)) marks.push_back(i);
  }
  size_t steps = number("STEPS", 10);
  if (marks.size() < steps + 2) return {0, runs.size(), 1, false};
  return {marks[marks.size() - 2 - steps], marks[marks.size() - 2], static_cast<double>(steps), true};
}

struct Sum {
  uint64_t count = 0, time = 0;
};

// The name as C++ has it, without what all names share, without its parameters, and not too long for a table.
std::string shortened(const std::string& name) {
  int status;
  char* demangled = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string plain = demangled ? demangled : name;
  free(demangled);
  for (const char* noise : {"void ", "at::native::", "(anonymous namespace)::", "<unnamed>::"}) {
    for (size_t at; (at = plain.find(noise)) != std::string::npos;) plain.erase(at, strlen(noise));
  }
  if (!plain.empty() && plain.back() == ')') {
    size_t at = plain.size();
    int depth = 0;
    do {
      --at;
      depth += (plain[at] == ')') - (plain[at] == '(');
    } while (at > 0 && depth > 0);
    if (at > 0) plain.resize(at);
  }
  std::replace(plain.begin(), plain.end(), '|', '/');
  return plain.size() > 110 ? plain.substr(0, 107) + "..." : plain;
}

void print() {
  cuptiActivityFlushAll(1);
  if (runs.empty()) return;
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.start < b.start; });
  auto [first, end, steps, is_found] = last_steps();
  std::map<int, Sum> sums;
  uint64_t busy = 0, reached = 0, total = 0;
  for (size_t i = first; i < end; ++i) {
    auto& sum = sums[runs[i].name];
    ++sum.count;
    sum.time += runs[i].end - runs[i].start;
    total += runs[i].end - runs[i].start;
    uint64_t begin = std::max(runs[i].start, reached);
    if (runs[i].end > begin) busy += runs[i].end - begin, reached = runs[i].end;
  }
  std::vector<std::pair<int, Sum>> sorted(sums.begin(), sums.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second.time > b.second.time; });
  const char* path = getenv("TABLE");
  FILE* to = path ? fopen(path, "w") : stderr;
  if (!to) return perror(path);
  fprintf(to, "%s: %.3f ms, of which the GPU is busy for %.3f ms; %.1f kernels.\n\n", is_found ? "A step" : "The whole run, as MARK was not found often enough",
          (runs[end - 1].end - runs[first].start) / 1e6 / steps, busy / 1e6 / steps, (end - first) / steps);
  fprintf(to, "| ms a step | share | calls | us a call | kernel |\n|---|---|---|---|---|\n");
  int left = number("SHOWN", 45);
  for (auto& [name, sum] : sorted) {
    if (left-- == 0) break;
    fprintf(to, "| %.4f | %.1f %% | %.1f | %.2f | `%s` |\n", sum.time / 1e6 / steps, 100.0 * sum.time / total, sum.count / steps,
            sum.time / 1e3 / sum.count, shortened(names[name]).c_str());
  }
  if (path) fclose(to);
}

}  // namespace

extern "C" int InitializeInjection() {
  cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
  for (auto kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET}) cuptiActivityEnable(kind);
  atexit(print);
  return 1;
}
