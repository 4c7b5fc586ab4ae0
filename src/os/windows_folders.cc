// Operations on folders and names.
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "os/windows_calls.h"

namespace kvasir::os {

namespace {

uint64_t since_1970(const FILETIME& time) {
  // From 1601, the epoch of Windows, in units of 100 ns.
  constexpr uint64_t between = 116'444'736'000'000'000u;
  const uint64_t ticks = uint64_t{time.dwHighDateTime} << 32 | time.dwLowDateTime;
  return ticks < between ? 0 : (ticks - between) * 100;
}

// Old systems, and file systems such as FAT, know only the older call, which fails while the file
// is in use.
bool is_unknown(DWORD error) {
  return error == ERROR_INVALID_PARAMETER || error == ERROR_INVALID_FUNCTION ||
         error == ERROR_NOT_SUPPORTED || error == ERROR_CALL_NOT_IMPLEMENTED;
}

HANDLE open_to_change(const WidePath& name, DWORD flags) {
  return CreateFileW(name.c_str(), DELETE | SYNCHRONIZE, share_all, nullptr, OPEN_EXISTING, flags,
                     nullptr);
}

bool is_folder(const wchar_t* name) {
  const DWORD attributes = GetFileAttributesW(name);
  return attributes != INVALID_FILE_ATTRIBUTES && (attributes & FILE_ATTRIBUTE_DIRECTORY) != 0;
}

bool is_file(const wchar_t* name) {
  return GetFileAttributesW(name) != INVALID_FILE_ATTRIBUTES && !is_folder(name);
}

// The system only reports denied access: if the file is otherwise writable, it is open or mapped
// elsewhere.
int refused(const WidePath& name, DWORD error) {
  const DWORD attributes = GetFileAttributesW(name.c_str());
  const bool may_write =
      attributes == INVALID_FILE_ATTRIBUTES || (attributes & FILE_ATTRIBUTE_READONLY) == 0;
  if (error == ERROR_ACCESS_DENIED && may_write && Handle(open_to_change(name, 0)).good())
    return failing(ERROR_SHARING_VIOLATION);
  return failing(error);
}

// Existing handles keep the old file, and new ones open the new file; a mapped file may be refused.
// The handle writes through, which includes the rename (there is no sync of a folder).
int replace(const WidePath& from, const WidePath& to) {
  {
    const Handle file(open_to_change(from, FILE_FLAG_WRITE_THROUGH));
    if (!file.good()) return failing();
    const std::size_t bytes = to.size() * sizeof(wchar_t);
    std::string memory(offsetof(FILE_RENAME_INFO, FileName) + bytes + sizeof(wchar_t), '\0');
    auto* rename = reinterpret_cast<FILE_RENAME_INFO*>(memory.data());
    rename->Flags = FILE_RENAME_FLAG_REPLACE_IF_EXISTS | FILE_RENAME_FLAG_POSIX_SEMANTICS;
    rename->FileNameLength = static_cast<DWORD>(bytes);
    std::memcpy(rename->FileName, to.c_str(), bytes);
    if (SetFileInformationByHandle(file, FileRenameInfoEx, rename,
                                   static_cast<DWORD>(memory.size())))
      return 0;
    if (!is_unknown(GetLastError())) return refused(to, GetLastError());
  }
  return MoveFileExW(from.c_str(), to.c_str(), MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)
             ? 0
             : refused(to, GetLastError());
}

int remove(const WidePath& name) {
  {
    const Handle file(open_to_change(name, FILE_FLAG_OPEN_REPARSE_POINT));
    if (!file.good()) return failing();
    FILE_DISPOSITION_INFO_EX gone{FILE_DISPOSITION_FLAG_DELETE |
                                  FILE_DISPOSITION_FLAG_POSIX_SEMANTICS};
    if (SetFileInformationByHandle(file, FileDispositionInfoEx, &gone, sizeof gone)) return 0;
    if (!is_unknown(GetLastError())) return refused(name, GetLastError());
  }
  return DeleteFileW(name.c_str()) ? 0 : refused(name, GetLastError());
}

}  // namespace

Status rename_replace(const std::string& from, const std::string& to) {
  const int result = retried("rename", to, [&] {
    const WidePath old_name(from), new_name(to);
    return old_name.good() && new_name.good() ? replace(old_name, new_name) : -1;
  });
  if (result != 0) return failed("replace", to, errno);
  return {};
}

// Renames are written through; the folder is flushed too where the system permits.
Status sync_folder_of(const std::string& path) {
  const WidePath name(path);
  if (!name.good()) return failed("open the folder of", path, errno);
  const std::wstring folder = name.folder();
  const int result = retried("sync_folder", folder_of(path), [&] {
    if (!is_folder(folder.c_str())) return failing(ERROR_PATH_NOT_FOUND);
    const Handle handle(CreateFileW(folder.c_str(), GENERIC_WRITE, share_all, nullptr,
                                    OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, nullptr));
    if (handle.good()) (void)FlushFileBuffers(handle);
    return 0;
  });
  if (result != 0) return failed("sync the folder", folder_of(path), errno);
  return {};
}

Status remove_file(const std::string& path) {
  const int result = retried("remove", path, [&] {
    const WidePath name(path);
    return name.good() ? remove(name) : -1;
  });
  if (result != 0) return failed("remove", path, errno);
  return {};
}

bool is_link(const std::string& path) {
  const WidePath name(path);
  WIN32_FIND_DATAW entry;
  const HANDLE search = name.good() ? FindFirstFileW(name.c_str(), &entry) : INVALID_HANDLE_VALUE;
  if (search == INVALID_HANDLE_VALUE) return false;
  FindClose(search);
  return (entry.dwFileAttributes & FILE_ATTRIBUTE_REPARSE_POINT) != 0 &&
         entry.dwReserved0 == IO_REPARSE_TAG_SYMLINK;
}

Status absolute_path(const std::string& path, std::string* out) {
  const WidePath name(path);
  if (!name.good()) return failed("find", path, errno);
  *out = narrow({name.c_str(), name.size()});
  return {};
}

// Creating a link is a privilege, so links are trusted.
Status find_target(const std::string& path, std::string* out) {
  if (name_begin(path) == path.size())
    return Status::error(Code::bad_argument, "\"%s\" does not name a file", shown(path));
  if (!is_link(path)) return absolute_path(path, out);
  const WidePath name(path);
  if (!name.good()) return failed("follow the symbolic link", path, errno);
  const Handle file(CreateFileW(name.c_str(), FILE_READ_ATTRIBUTES, share_all, nullptr,
                                OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, nullptr));
  if (!file.good() && failing() != 0 && errno == ENOENT)
    return Status::error(Code::bad_argument,
                         "%s is a symbolic link to no file; nothing was written", shown(path))
        .with_errno(ENOENT);
  if (!file.good()) return failed("follow the symbolic link", path, errno);
  const DWORD needed = GetFinalPathNameByHandleW(file, nullptr, 0, FILE_NAME_NORMALIZED);
  std::wstring leads(needed, L'\0');
  const DWORD size =
      needed == 0 ? 0 : GetFinalPathNameByHandleW(file, leads.data(), needed, FILE_NAME_NORMALIZED);
  if (size == 0 || size >= needed) {
    (void)failing();
    return failed("follow the symbolic link", path, errno);
  }
  leads.resize(size);
  *out = narrow(leads);
  return {};
}

bool exists(const std::string& path) {
  const WidePath name(path);
  if (!name.good()) return false;
  return GetFileAttributesW(name.c_str()) != INVALID_FILE_ATTRIBUTES ||
         (failing() != 0 && errno != ENOENT && errno != ENOTDIR);
}

Status File::identity(FileIdentity* out) const {
  const HANDLE handle = reinterpret_cast<HANDLE>(fd_);
  BY_HANDLE_FILE_INFORMATION info;
  FILE_BASIC_INFO times;
  if ((!GetFileInformationByHandle(handle, &info) ||
       !GetFileInformationByHandleEx(handle, FileBasicInfo, &times, sizeof times)) &&
      failing() != 0)
    return failed("ask the size of", path_, errno);
  const auto both = [](DWORD high, DWORD low) { return uint64_t{high} << 32 | low; };
  const auto time = [](LARGE_INTEGER t) {
    return since_1970({t.LowPart, static_cast<DWORD>(t.HighPart)});
  };
  *out = {info.dwVolumeSerialNumber, both(info.nFileIndexHigh, info.nFileIndexLow),
          both(info.nFileSizeHigh, info.nFileSizeLow), time(times.LastWriteTime),
          time(times.ChangeTime)};
  return {};
}

// Device names are reserved with any extension.
bool can_name_file(const std::string& name) {
  if (name.find_first_of("<>:\"|?*") != std::string::npos || name.back() == '.' ||
      name.back() == ' ' || !WidePath(name).good())
    return false;
  std::string stem = name.substr(0, name.find('.'));
  while (!stem.empty() && stem.back() == ' ') stem.pop_back();
  for (char& c : stem) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  for (const char* device : {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"})
    if (stem == device) return false;
  return !(stem.size() == 4 && (stem.starts_with("COM") || stem.starts_with("LPT")) &&
           stem[3] >= '0' && stem[3] <= '9');
}

Status list_folder(const std::string& folder, std::vector<FolderEntry>* out) {
  WIN32_FIND_DATAW entry;
  HANDLE search = INVALID_HANDLE_VALUE;
  const int opened = retried("list", folder, [&] {
    const WidePath pattern(folder + "/*");
    if (!pattern.good()) return -1;
    search = FindFirstFileExW(pattern.c_str(), FindExInfoBasic, &entry, FindExSearchNameMatch,
                              nullptr, FIND_FIRST_EX_LARGE_FETCH);
    if (search != INVALID_HANDLE_VALUE) return 0;
    const DWORD error = GetLastError();
    const WidePath name(folder);
    return failing(name.good() && is_file(name.c_str()) ? ERROR_DIRECTORY : error);
  });
  if (opened != 0) return failed("list the folder", folder, errno);
  struct Close {
    HANDLE search;
    ~Close() { FindClose(search); }
  } close{search};
  std::vector<FolderEntry> found;
  do {
    if ((entry.dwFileAttributes & (FILE_ATTRIBUTE_DIRECTORY | FILE_ATTRIBUTE_DEVICE)) != 0)
      continue;
    const bool link = (entry.dwFileAttributes & FILE_ATTRIBUTE_REPARSE_POINT) != 0 &&
                      entry.dwReserved0 == IO_REPARSE_TAG_SYMLINK;
    if (link) continue;  // the search has no data of its target
    found.push_back({narrow(entry.cFileName),
                     uint64_t{entry.nFileSizeHigh} << 32 | entry.nFileSizeLow,
                     since_1970(entry.ftLastWriteTime)});
  } while (FindNextFileW(search, &entry));
  if (GetLastError() != ERROR_NO_MORE_FILES) {
    (void)failing();
    return failed("list the folder", folder, errno);
  }
  *out = std::move(found);
  return {};
}

Status make_folder(const std::string& folder) {
  const WidePath name(folder);
  if (!name.good()) return failed("make the folder", folder, errno);
  const int result = retried("make_folder", folder, [&] {
    return CreateDirectoryW(name.c_str(), nullptr) ? 0 : failing();
  });
  if (result == 0) return {};
  const int error = errno;
  // for the root of a drive the system reports denied access
  if (is_folder(name.c_str())) return {};
  errno = error;
  if (errno == EEXIST)
    return Status::error(Code::bad_argument, "%s is not a folder", shown(folder))
        .with_errno(ENOTDIR);
  return failed("make the folder", folder, errno);
}

Status touch(const std::string& path) {
  const int result = retried("touch", path, [&] {
    const WidePath name(path);
    if (!name.good()) return -1;
    const Handle file(CreateFileW(name.c_str(), FILE_WRITE_ATTRIBUTES, share_all, nullptr,
                                  OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, nullptr));
    FILETIME now;
    GetSystemTimePreciseAsFileTime(&now);
    return file.good() && SetFileTime(file, nullptr, nullptr, &now) ? 0 : failing();
  });
  if (result != 0) return failed("set the time of", path, errno);
  return {};
}

}  // namespace kvasir::os
