// Sessions of the fixtures, and files made from files.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cachefile/cache_file.h"
#include "helpers.h"

namespace kvasir::test {

inline std::shared_ptr<const Model> fixture(const std::string& name) {
  static std::map<std::string, std::shared_ptr<const Model>> models;
  auto& model = models[name];
  if (!model) model = open_model(FIXTURES "/models/" + name + ".gguf");
  return model;
}

// A sequence of some_tokens().
inline std::unique_ptr<Session> fresh(const std::string& name, std::size_t tokens,
                                      const SessionOptions& options = {}) {
  auto session = open_session(fixture(name), options);
  if (tokens > 0) read(session.get(), some_tokens(tokens));
  return session;
}

inline std::unique_ptr<Session> fork_of(Session& session) {
  std::unique_ptr<Session> fork;
  REQUIRE(session.fork(&fork).ok());
  return fork;
}

inline std::unique_ptr<Session> loaded(const std::string& name, const std::string& path,
                                       uint64_t tokens = 0, const SessionOptions& options = {}) {
  std::unique_ptr<Session> session;
  const Status s = Session::load(fixture(name), path, options, true, nullptr, {}, &session, tokens);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return session;
}

inline void save(Session* session, const std::string& path) {
  const Status s = session->save(path, nullptr, {});
  REQUIRE_MESSAGE(s.ok(), s.message());
}

inline uint64_t again(const Session& session) { return session.stats().prefilled_again; }

// The same continuation and the same bits, from forks of both.
inline void check_same(Session& a, Session& b) {
  CHECK(std::equal(a.tokens().begin(), a.tokens().end(), b.tokens().begin(), b.tokens().end()));
  const auto first = fork_of(a), second = fork_of(b);
  CHECK(logits_after(first.get(), 100) == logits_after(second.get(), 100));
  CHECK(continue_with(first.get(), 8) == continue_with(second.get(), 8));
}

// Copies a file with other bytes in one section, under correct checksums. edit: the bytes and the
// version of the section.
inline void rewrite_section(
    const std::string& path, const std::string& to, format::SectionKind kind,
    const std::function<void(std::vector<std::byte>*, uint32_t* version)>& edit) {
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  struct Part {
    format::SectionKind kind;
    uint32_t version;
    std::vector<std::byte> bytes;
  };
  std::vector<Part> parts;
  for (const CacheFile::Section& section : file->sections()) {
    const auto bytes = file->bytes(section.kind);
    parts.push_back({section.kind, section.version, {bytes.begin(), bytes.end()}});
    if (section.kind == kind) edit(&parts.back().bytes, &parts.back().version);
  }
  std::unique_ptr<CacheWriter> writer;
  REQUIRE(CacheWriter::create(to, file->identity(), &writer).ok());
  for (const Part& part : parts)
    REQUIRE(writer->add_section(part.kind, part.version, part.bytes.size()).ok());
  REQUIRE(writer->begin().ok());
  for (const Part& part : parts) REQUIRE(writer->write(part.bytes.data(), part.bytes.size()).ok());
  REQUIRE(writer->finish().ok());
}

}  // namespace kvasir::test
