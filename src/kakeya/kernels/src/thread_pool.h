// A tiny fork-join pool. The caller works too; results never depend on the number of threads,
// because every task writes its own output.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace kakeya {

class ThreadPool {
 public:
  // The one pool of the process. It is never destroyed: at exit a worker may still be spinning.
  static ThreadPool& shared();

  // Threads that compute, the caller included. Not to be called from inside a task.
  void resize(int threads);
  int size() const { return size_.load(std::memory_order_relaxed); }

  // Calls body(task) once for each task in [0, tasks) and returns when all are done. `work` is the number of
  // multiplications in all of them together, roughly: a few are sooner done than shared.
  // Safe from any thread: when another caller holds the pool, the tasks run on this thread alone.
  template <class Body>
  void run(int tasks, std::int64_t work, const Body& body) {
    constexpr std::int64_t kWorthSharing = 128 * 1024;
    if (tasks > 1 && work >= kWorthSharing && size() > 1 && callers_.try_lock()) {
      std::lock_guard<std::mutex> held(callers_, std::adopt_lock);
      run_shared(tasks, [](const void* context, int task) { (*static_cast<const Body*>(context))(task); }, &body);
      return;
    }
    for (int task = 0; task < tasks; ++task) body(task);
  }

 private:
  using Function = void (*)(const void* context, int task);

  void run_shared(int tasks, Function function, const void* context);
  bool claim_and_run();
  void work(std::uint64_t seen);
  bool spin_for_job(std::uint64_t seen) const;
  void sleep_until_job(std::uint64_t seen);
  void stop_workers();

  std::mutex callers_;  // held by the thread whose job is running
  std::vector<std::thread> workers_;
  std::atomic<int> size_{1};
  std::atomic<bool> stopping_{false};

  // High half: number of the job. Low half: tasks nobody has claimed yet. A claim is one
  // compare-and-swap on the whole word, so a worker that was late for a job cannot touch the next one.
  std::atomic<std::uint64_t> state_{0};
  std::atomic<Function> function_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int> tasks_{0};
  std::atomic<int> unfinished_{0};

  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
};

}  // namespace kakeya
