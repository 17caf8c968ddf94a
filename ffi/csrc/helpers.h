// Threads that help whoever calls a kernel.
#pragma once

#include <cstdint>
#include <functional>

namespace jtile {

// Starts a task on some thread.
using Schedule = std::function<void(std::function<void()>)>;

// Calls `work` with the number of the worker on `workers` workers: number 0 is this thread. The others are threads that
// stay from call to call, or tasks for `schedule`, which any thread may run, at once, late or after this returned. This
// never waits for a worker that has not begun, so `work` must get everything done on one thread, too. Where there is no
// memory or no thread for more helpers, those that began do it all.
void with_helpers(int64_t workers, const Schedule& schedule, const std::function<void(int64_t)>& work);

}  // namespace jtile
