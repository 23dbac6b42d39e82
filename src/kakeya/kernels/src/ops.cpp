#include "ops.h"

#include <atomic>
#include <cstring>
#include <vector>

#include "ops_tables.h"

#if KAKEYA_ARM64 && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kakeya {
namespace {

#if KAKEYA_ARM64
bool has_dot_product() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every Apple processor of this family
#endif
}
#endif

// Best first.
std::vector<const Ops*> usable_ops() {
  std::vector<const Ops*> usable;
#if KAKEYA_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
    usable.push_back(&kAvx512Ops);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    usable.push_back(&kAvx2Ops);
  }
#endif
#if KAKEYA_ARM64
  if (has_dot_product()) usable.push_back(&kNeonOps);
#endif
  usable.push_back(&kGenericOps);
  return usable;
}

std::atomic<const Ops*>& selected() {
  static std::atomic<const Ops*> ops{usable_ops().front()};
  return ops;
}

}  // namespace

const Ops& active_ops() { return *selected().load(std::memory_order_relaxed); }

bool select_ops(const char* name) {
  for (const Ops* ops : usable_ops()) {
    if (std::strcmp(ops->name, name) == 0) {
      selected().store(ops);
      return true;
    }
  }
  return false;
}

}  // namespace kakeya
