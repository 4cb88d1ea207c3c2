// The threads that share the work of one operator call.
#pragma once

#include <cstdint>

namespace sluicegate {

// Number of threads, the calling one included.
int num_threads();
void set_num_threads(int count);

using Task = void (*)(const void* context, int64_t index);

// Run task(context, 0 .. count - 1), each once, in any order and on any thread; returns when all are done.
void run_tasks(int64_t count, Task task, const void* context);

// The same for a callable of one index.
template <class Body>
void parallel(int64_t count, const Body& body) {
    run_tasks(
        count, [](const void* context, int64_t index) { (*static_cast<const Body*>(context))(index); }, &body);
}

// The same in `count` elements cut into chunks of about `grain`: body(begin, end).
template <class Body>
void parallel_ranges(int64_t count, int64_t grain, const Body& body) {
    parallel((count + grain - 1) / grain, [&](int64_t chunk) {
        const int64_t begin = chunk * grain;
        body(begin, begin + grain < count ? begin + grain : count);
    });
}

}  // namespace sluicegate
