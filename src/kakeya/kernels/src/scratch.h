// Memory a thread keeps from call to call, so that no operation allocates once it is warm.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace kakeya {

class Scratch {
 public:
  // At least `count` elements, aligned to a cache line, contents undefined. The previous array is gone.
  template <class T>
  T* array(std::int64_t count) {
    const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(T));
    if (bytes > capacity_) {
      memory_.reset(static_cast<char*>(::operator new(static_cast<std::size_t>(bytes), std::align_val_t{64})));
      capacity_ = bytes;
    }
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(char* memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };
  std::unique_ptr<char, Free> memory_;
  std::int64_t capacity_ = 0;
};

}  // namespace kakeya
