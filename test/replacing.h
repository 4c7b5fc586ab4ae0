// Whether this system replaces a file that is in use: of Windows where it renames as POSIX says,
// which Wine 8 does not; it says so then (os_windows_test.cc). Cases that save over what they have
// loaded are skipped there.
#pragma once

#include "os/os.h"
#include "temp_folder.h"

inline bool replaces_files_in_use() {
  static const bool answer = [] {
#ifndef _WIN32
    return true;  // where it does not, the cases have to fail
#endif
    const TempFolder folder;
    kvasir::os::File file;
    kvasir::os::Mapping mapping;
    write_file(folder.file("a"), {1});
    write_file(folder.file("b"), {2});
    return kvasir::os::File::open_read(folder.file("a"), &file).ok() &&
           kvasir::os::Mapping::map(file, &mapping).ok() &&
           kvasir::os::rename_replace(folder.file("b"), folder.file("a")).ok();
  }();
  return answer;
}
