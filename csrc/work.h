// Distributes work: threads take items in order, one at a time.
#pragma once
#include <atomic>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#elif defined(SPANFORMER_STD_THREADS)
#include <thread>
#endif
#include "rules.h"

namespace spanformer {
namespace SPANFORMER_ISA {

// Below this many multiply-adds a second thread costs more time than it saves.
#if defined(SPANFORMER_SMALL)
constexpr double SMALL = SPANFORMER_SMALL;
#else
constexpr double SMALL = 1e6;
#endif

template <class Item>  // item(index) is called once for each index in [0, count), lowest first
static void for_items(long count, long threads, double cost, Item item) {
  std::atomic<long> next{0};
  auto work = [&]() {
    for (long t; (t = next.fetch_add(1, std::memory_order_relaxed)) < count;) item(t);
  };
#if defined(_OPENMP)
  if (threads > 1 && count > 1 && cost > SMALL) {
#pragma omp parallel num_threads((int)std::min(threads, count))
    work();
    return;
  }
#elif defined(SPANFORMER_STD_THREADS)  // for ThreadSanitizer, which understands these threads but not libgomp's
  if (threads > 1 && count > 1 && cost > SMALL) {
    std::vector<std::thread> others;
    for (long t = 1; t < std::min(threads, count); t++) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
    return;
  }
#endif
  (void)threads, (void)cost;
  work();
}

static inline Arena& arena() {
  thread_local Arena a;
  return a;
}

// Many megabytes of new memory cause a page fault every 4 KiB, which can take as long as the work of short spans; request
// large pages where the system allows it.
static inline void prefer_large_pages(const Rows& r, long bytes) {
#if defined(__linux__)
  constexpr uintptr_t LARGE = 2u << 20;
  if ((uintptr_t)bytes < LARGE) return;
  // Rounded outwards: a large page may hold the ends of two neighbours. Unmapped pages are skipped.
  const uintptr_t from = reinterpret_cast<uintptr_t>(r.data) / LARGE * LARGE;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(r.data) + (uintptr_t)bytes + LARGE - 1) / LARGE * LARGE;
  madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)r, (void)bytes;
#endif
}

static inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
