#include "thread_pool.h"

#include <chrono>

namespace kakeya {
namespace {

// Long enough to bridge the Python code between two operations of one step.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr int kPausesPerClockRead = 64;
// A caller that waits longer than this may have lost its helper to another process: let both run.
constexpr int kPausesBeforeYield = 1 << 10;

constexpr std::uint64_t kUnclaimedMask = 0xffffffffu;

std::uint64_t job_of(std::uint64_t state) { return state >> 32; }

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool& ThreadPool::shared() {
  static ThreadPool* pool = new ThreadPool();
  return *pool;
}

void ThreadPool::resize(int threads) {
  std::lock_guard<std::mutex> held(callers_);
  if (threads == size()) return;
  stop_workers();
  const std::uint64_t seen = job_of(state_.load());
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, seen] { work(seen); });
  size_.store(threads);
}

void ThreadPool::stop_workers() {
  stopping_.store(true);
  {
    std::lock_guard<std::mutex> asleep(sleep_mutex_);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  stopping_.store(false);
}

void ThreadPool::run_shared(int tasks, Function function, const void* context) {
  function_.store(function, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  tasks_.store(tasks, std::memory_order_relaxed);
  unfinished_.store(tasks, std::memory_order_relaxed);
  const std::uint64_t job = (job_of(state_.load(std::memory_order_relaxed)) + 1) & kUnclaimedMask;
  state_.store(job << 32 | static_cast<std::uint64_t>(tasks));
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> asleep(sleep_mutex_);
    wake_.notify_all();
  }
  while (claim_and_run()) {
  }
  for (int pauses = 0; unfinished_.load(std::memory_order_acquire) > 0; ++pauses) {
    if (pauses < kPausesBeforeYield) {
      pause_briefly();
    } else {
      std::this_thread::yield();
    }
  }
}

// The job's description cannot change while one of its tasks is unclaimed, so reading it between
// the load and a successful exchange is safe.
bool ThreadPool::claim_and_run() {
  std::uint64_t state = state_.load(std::memory_order_acquire);
  for (;;) {
    const int unclaimed = static_cast<int>(state & kUnclaimedMask);
    if (unclaimed == 0) return false;
    const Function function = function_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    const int task = tasks_.load(std::memory_order_relaxed) - unclaimed;
    if (state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      function(context, task);
      unfinished_.fetch_sub(1, std::memory_order_release);
      return true;
    }
  }
}

void ThreadPool::work(std::uint64_t seen) {
  while (!stopping_.load(std::memory_order_relaxed)) {
    if (!spin_for_job(seen)) sleep_until_job(seen);
    seen = job_of(state_.load(std::memory_order_acquire));
    while (claim_and_run()) {
    }
  }
}

bool ThreadPool::spin_for_job(std::uint64_t seen) const {
  const auto give_up = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (job_of(state_.load(std::memory_order_relaxed)) != seen || stopping_.load(std::memory_order_relaxed)) {
        return true;
      }
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < give_up);
  return false;
}

void ThreadPool::sleep_until_job(std::uint64_t seen) {
  std::unique_lock<std::mutex> asleep(sleep_mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(asleep, [&] { return job_of(state_.load()) != seen || stopping_.load(); });
  sleepers_.fetch_sub(1);
}

}  // namespace kakeya
