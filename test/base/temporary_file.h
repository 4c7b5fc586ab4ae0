#pragma once

#include <doctest/doctest.h>

#include <string>

#include "os/os.h"
#include "temp_folder.h"

// A new file of these bytes, open for writing under a name of its own.
inline kvasir::os::File temporary(const TempFolder& folder, const std::string& bytes = {}) {
  kvasir::os::File file;
  const kvasir::Status s = kvasir::os::File::create_temporary(folder.file("target"), &file);
  REQUIRE_MESSAGE(s.ok(), s.message());
  REQUIRE(file.write(0, bytes.data(), bytes.size()).ok());
  return file;
}
