// The memory that control groups of Linux leave to this process: containers and services have them.
#pragma once

#include <cstdint>
#include <string>

namespace kvasir::os {

// Bytes that the group, and the groups above it, still grant; UINT64_MAX without a limit. Pages of
// files do not count as taken, as in MemAvailable: the system drops them before all else.
// mount: "/sys/fs/cgroup". groups: "/proc/self/cgroup". A group that the mount does not show, as
// in a container, stands for the groups above it that it shows.
uint64_t cgroup_memory_left(const std::string& mount, const std::string& groups);

}  // namespace kvasir::os
