// Wrong calls of files, packed files and libraries.
#include "misuse.h"

namespace api_test {

void Misuses::add_files() {
  const std::string nowhere = folder_.file("none/a.kv");
  add("kv_session_prepare", "session",
      [](kv_error* e) { return kv_session_prepare(nullptr, nullptr, e); });
  add("kv_save", "session",
      [&](kv_error* e) { return kv_save(nullptr, path_.c_str(), nullptr, e); });
  add("kv_save", "path", [&](kv_error* e) { return kv_save(session_.get(), nullptr, nullptr, e); });
  add(
      "kv_save", "no such folder",
      [&, nowhere](kv_error* e) { return kv_save(session_.get(), nowhere.c_str(), nullptr, e); },
      KV_NOT_FOUND);
  add("kv_load", "model", [&](kv_error* e) {
    return kv_load(nullptr, path_.c_str(), nullptr, nullptr, &out_.session, e);
  });
  add("kv_load", "path", [&](kv_error* e) {
    return kv_load(tiny_model(), nullptr, nullptr, nullptr, &out_.session, e);
  });
  add("kv_load", "out", [&](kv_error* e) {
    return kv_load(tiny_model(), path_.c_str(), nullptr, nullptr, nullptr, e);
  });
  add(
      "kv_load", "no such file",
      [&, nowhere](kv_error* e) {
        return kv_load(tiny_model(), nowhere.c_str(), nullptr, nullptr, &out_.session, e);
      },
      KV_NOT_FOUND);
  add(
      "kv_load", "another kind of file",
      [&](kv_error* e) {
        return kv_load(tiny_model(), tiny_path, nullptr, nullptr, &out_.session, e);
      },
      KV_NOT_A_CACHE);
  add("kv_load_prefix", "model", [&](kv_error* e) {
    return kv_load_prefix(nullptr, path_.c_str(), 5, nullptr, nullptr, &out_.session, e);
  });
  add("kv_load_prefix", "path", [&](kv_error* e) {
    return kv_load_prefix(tiny_model(), nullptr, 5, nullptr, nullptr, &out_.session, e);
  });
  add("kv_load_prefix", "out", [&](kv_error* e) {
    return kv_load_prefix(tiny_model(), path_.c_str(), 5, nullptr, nullptr, nullptr, e);
  });
  for (const uint64_t tokens : {uint64_t{201}, UINT64_MAX})
    add("kv_load_prefix", "more tokens than there are", [&, tokens](kv_error* e) {
      return kv_load_prefix(tiny_model(), path_.c_str(), tokens, nullptr, nullptr, &out_.session,
                            e);
    });
  add(
      "kv_load", "a shorter context",
      [&](kv_error* e) {
        kv_session_options o = small_options();
        o.context_tokens = 199;
        return kv_load(tiny_model(), path_.c_str(), &o, nullptr, &out_.session, e);
      },
      KV_CONTEXT_FULL);
  add("kv_session_compose", "model", [&](kv_error* e) {
    const char* paths[] = {path_.c_str()};
    return kv_session_compose(nullptr, paths, 1, nullptr, nullptr, &out_.session, e);
  });
  add("kv_session_compose", "paths", [&](kv_error* e) {
    return kv_session_compose(tiny_model(), nullptr, 2, nullptr, nullptr, &out_.session, e);
  });
  add("kv_session_compose", "no document", [&](kv_error* e) {
    return kv_session_compose(tiny_model(), nullptr, 0, nullptr, nullptr, &out_.session, e);
  });
  add("kv_session_compose", "path 1", [&](kv_error* e) {
    const char* paths[] = {path_.c_str(), nullptr};
    return kv_session_compose(tiny_model(), paths, 2, nullptr, nullptr, &out_.session, e);
  });
  add("kv_session_compose", "struct_size of kv_compose_options", [&](kv_error* e) {
    const char* paths[] = {path_.c_str()};
    kv_compose_options bad{};
    bad.struct_size = 3;
    return kv_session_compose(tiny_model(), paths, 1, &bad, nullptr, &out_.session, e);
  });
  add("kv_session_compose", "out", [&](kv_error* e) {
    const char* paths[] = {path_.c_str()};
    return kv_session_compose(tiny_model(), paths, 1, nullptr, nullptr, nullptr, e);
  });
  add(
      "kv_session_set_documents", "not over several",
      [&](kv_error* e) {
        const char* paths[] = {"a.kv"};
        return kv_session_set_documents(session_.get(), paths, 1, nullptr, e);
      },
      KV_BAD_STATE);
  add("kv_session_set_documents", "paths", [&](kv_error* e) {
    return kv_session_set_documents(session_.get(), nullptr, 1, nullptr, e);
  });
  add("kv_session_set_documents", "session",
      [&](kv_error* e) { return kv_session_set_documents(nullptr, nullptr, 0, nullptr, e); });
  add("kv_file_get_document", "path",
      [&](kv_error* e) { return kv_file_get_document(nullptr, 0, &out_.file_document, e); });
  add("kv_file_get_document", "document",
      [&](kv_error* e) { return kv_file_get_document(path_.c_str(), 0, nullptr, e); });
  add(
      "kv_file_get_document", "0 documents",
      [&](kv_error* e) { return kv_file_get_document(path_.c_str(), 0, &out_.file_document, e); },
      KV_NOT_FOUND);
  add("kv_file_inspect", "path",
      [&](kv_error* e) { return kv_file_inspect(nullptr, &out_.file_info, e); });
  add("kv_file_inspect", "info",
      [&](kv_error* e) { return kv_file_inspect(path_.c_str(), nullptr, e); });
  add(
      "kv_file_inspect", "another kind of file",
      [&](kv_error* e) { return kv_file_inspect(tiny_path, &out_.file_info, e); }, KV_NOT_A_CACHE);
  add("kv_file_verify", "path", [](kv_error* e) { return kv_file_verify(nullptr, nullptr, e); });
  add("kv_file_inspect", "struct_size of kv_file_info", [&](kv_error* e) {
    kv_file_info bad{};
    return kv_file_inspect(path_.c_str(), &bad, e);
  });
  add("kv_file_get_document", "struct_size of kv_file_document", [&](kv_error* e) {
    kv_file_document bad{};
    return kv_file_get_document(path_.c_str(), 0, &bad, e);
  });
  add_control("kv_session_prepare", [&](const kv_control* c, kv_error* e) {
    return kv_session_prepare(session_.get(), c, e);
  });
  add_control("kv_save", [&](const kv_control* c, kv_error* e) {
    return kv_save(session_.get(), path_.c_str(), c, e);
  });
  add_control("kv_load", [&](const kv_control* c, kv_error* e) {
    return kv_load(tiny_model(), path_.c_str(), nullptr, c, &out_.session, e);
  });
  add_control("kv_load_prefix", [&](const kv_control* c, kv_error* e) {
    return kv_load_prefix(tiny_model(), path_.c_str(), 5, nullptr, c, &out_.session, e);
  });
  add_control("kv_file_verify", [&](const kv_control* c, kv_error* e) {
    return kv_file_verify(path_.c_str(), c, e);
  });
}

void Misuses::add_packing() {
  const std::string packed = folder_.file("b.kvz");
  add("kv_pack", "path",
      [=](kv_error* e) { return kv_pack(nullptr, packed.c_str(), 0, nullptr, e); });
  add("kv_pack", "packed_path",
      [&](kv_error* e) { return kv_pack(path_.c_str(), nullptr, 0, nullptr, e); });
  add("kv_pack", "the same path twice",
      [&](kv_error* e) { return kv_pack(path_.c_str(), path_.c_str(), 0, nullptr, e); });
  for (const uint32_t level : {20u, UINT32_MAX})
    add("kv_pack", "level", [=, this](kv_error* e) {
      return kv_pack(path_.c_str(), packed.c_str(), level, nullptr, e);
    });
  add(
      "kv_pack", "no such file",
      [=](kv_error* e) { return kv_pack("/nowhere/x", packed.c_str(), 0, nullptr, e); },
      KV_NOT_FOUND);
  add(
      "kv_pack", "another kind of file",
      [=](kv_error* e) { return kv_pack(tiny_path, packed.c_str(), 0, nullptr, e); },
      KV_NOT_A_CACHE);
  add(
      "kv_pack", "no such folder",
      [&](kv_error* e) { return kv_pack(path_.c_str(), "/nowhere/x", 0, nullptr, e); },
      KV_NOT_FOUND);
  add("kv_unpack", "packed_path",
      [&](kv_error* e) { return kv_unpack(nullptr, path_.c_str(), nullptr, e); });
  add("kv_unpack", "path",
      [&](kv_error* e) { return kv_unpack(path_.c_str(), nullptr, nullptr, e); });
  add(
      "kv_unpack", "another kind of file",
      [=, this](kv_error* e) { return kv_unpack(path_.c_str(), packed.c_str(), nullptr, e); },
      KV_NOT_A_CACHE);
  add("kv_packed_inspect", "path",
      [&](kv_error* e) { return kv_packed_inspect(nullptr, &out_.packed_info, e); });
  add(
      "kv_packed_inspect", "another kind of file",
      [&](kv_error* e) { return kv_packed_inspect(path_.c_str(), &out_.packed_info, e); },
      KV_NOT_A_CACHE);
  const std::string whole = library_folder_.file("whole.kvz");
  REQUIRE(kv_pack(path_.c_str(), whole.c_str(), 0, nullptr, nullptr) == KV_OK);
  add("kv_packed_inspect", "info",
      [=](kv_error* e) { return kv_packed_inspect(whole.c_str(), nullptr, e); });
  add("kv_packed_inspect", "struct_size of kv_packed_info", [=](kv_error* e) {
    kv_packed_info bad{};
    return kv_packed_inspect(whole.c_str(), &bad, e);
  });
  add_control("kv_pack", [=, this](const kv_control* c, kv_error* e) {
    return kv_pack(path_.c_str(), packed.c_str(), 0, c, e);
  });
  add_control("kv_unpack", [=, this](const kv_control* c, kv_error* e) {
    return kv_unpack(path_.c_str(), packed.c_str(), c, e);
  });
}

void Misuses::add_library() {
  kv_library* const l = library_;
  add("kv_library_open", "folder",
      [&](kv_error* e) { return kv_library_open(nullptr, nullptr, &out_.library, e); });
  add("kv_library_open", "an empty name",
      [&](kv_error* e) { return kv_library_open("", nullptr, &out_.library, e); });
  add("kv_library_open", "out",
      [&](kv_error* e) { return kv_library_open(folder_.path().c_str(), nullptr, nullptr, e); });
  add("kv_library_open", "a file",
      [&](kv_error* e) { return kv_library_open(path_.c_str(), nullptr, &out_.library, e); });
  add(
      "kv_library_open", "no such folder",
      [&](kv_error* e) {
        return kv_library_open(folder_.file("none/lib").c_str(), nullptr, &out_.library, e);
      },
      KV_NOT_FOUND);
  add("kv_library_open", "flags", [&](kv_error* e) {
    kv_library_options o;
    kv_init(&o, sizeof o);
    o.flags = 1;
    return kv_library_open(folder_.path().c_str(), &o, &out_.library, e);
  });
  add("kv_library_open", "struct_size of kv_library_options", [&](kv_error* e) {
    kv_library_options o{};
    return kv_library_open(folder_.path().c_str(), &o, &out_.library, e);
  });
  add("kv_library_compose", "library", [&](kv_error* e) {
    return kv_library_compose(nullptr, tiny_model(), nullptr, 0, nullptr, nullptr, &out_.session,
                              e);
  });
  add("kv_library_compose", "model", [&, l](kv_error* e) {
    return kv_library_compose(l, nullptr, nullptr, 0, nullptr, nullptr, &out_.session, e);
  });
  add("kv_library_compose", "names", [&, l](kv_error* e) {
    return kv_library_compose(l, tiny_model(), nullptr, 1, nullptr, nullptr, &out_.session, e);
  });
  add("kv_library_compose", "name 0", [&, l](kv_error* e) {
    const char* names[] = {nullptr};
    return kv_library_compose(l, tiny_model(), names, 1, nullptr, nullptr, &out_.session, e);
  });
  add("kv_library_compose", "out", [l](kv_error* e) {
    return kv_library_compose(l, tiny_model(), nullptr, 0, nullptr, nullptr, nullptr, e);
  });
  add(
      "kv_library_compose", "a name that is not there",
      [&, l](kv_error* e) {
        const char* names[] = {"no such document"};
        return kv_library_compose(l, tiny_model(), names, 1, nullptr, nullptr, &out_.session, e);
      },
      KV_NOT_FOUND);
  add("kv_library_list", "struct_size of kv_library_document", [l](kv_error* e) {
    kv_library_document bad{};
    return kv_library_list(l, 0, &bad, e);
  });
  add("kv_library_list", "library",
      [&](kv_error* e) { return kv_library_list(nullptr, 0, &out_.document, e); });
  add("kv_library_list", "document",
      [l](kv_error* e) { return kv_library_list(l, 0, nullptr, e); });
  add(
      "kv_library_list", "after the last",
      [&, l](kv_error* e) { return kv_library_list(l, 0, &out_.document, e); }, KV_NOT_FOUND);
  add("kv_library_session", "library", [&](kv_error* e) {
    return kv_library_session(nullptr, tiny_model(), "a", 1, nullptr, nullptr, &out_.session,
                              &out_.result, e);
  });
  add("kv_library_session", "model", [&, l](kv_error* e) {
    return kv_library_session(l, nullptr, "a", 1, nullptr, nullptr, &out_.session, &out_.result, e);
  });
  add("kv_library_session", "text", [&, l](kv_error* e) {
    return kv_library_session(l, tiny_model(), nullptr, 1, nullptr, nullptr, &out_.session,
                              &out_.result, e);
  });
  add("kv_library_session", "no text", [&, l](kv_error* e) {
    return kv_library_session(l, tiny_model(), nullptr, 0, nullptr, nullptr, &out_.session,
                              &out_.result, e);
  });
  add("kv_library_session", "out", [&, l](kv_error* e) {
    return kv_library_session(l, tiny_model(), "a", 1, nullptr, nullptr, nullptr, &out_.result, e);
  });
  add("kv_library_session", "struct_size of kv_library_result", [&, l](kv_error* e) {
    kv_library_result bad{};
    return kv_library_session(l, tiny_model(), "a", 1, nullptr, nullptr, &out_.session, &bad, e);
  });
  add(
      "kv_library_session", "more than the context",
      [&, l](kv_error* e) {
        const std::string text(100'000, 'a');
        return kv_library_session(l, tiny_model(), text.data(), text.size(), nullptr, nullptr,
                                  &out_.session, &out_.result, e);
      },
      KV_CONTEXT_FULL);
  const auto option =
      [&, l](const char* how,
             std::function<void(kv_library_session_options*, kv_session_options*)> change) {
        add("kv_library_session", how, [&, l, change](kv_error* e) {
          kv_library_session_options o;
          kv_init(&o, sizeof o);
          kv_session_options s = small_options();
          o.session = &s;
          change(&o, &s);
          return kv_library_session(l, tiny_model(), "a", 1, &o, nullptr, &out_.session,
                                    &out_.result, e);
        });
      };
  option("flags", [](auto* o, auto*) { o->flags = 2; });
  option("struct_size of kv_library_session_options", [](auto* o, auto*) { o->struct_size = 3; });
  option("a session's options", [](auto*, auto* s) { s->prefill = strategy("ood"); });
  add_control("kv_library_session", [&, l](const kv_control* c, kv_error* e) {
    return kv_library_session(l, tiny_model(), "a", 1, nullptr, c, &out_.session, &out_.result, e);
  });
  static const std::string long_name(201, 'x');
  for (const char* name : {"", "a/b", "../a", ".a", "a\nb", "a\\b", long_name.c_str()}) {
    option("name", [name](auto* o, auto*) { o->name = name; });
    add("kv_library_rename", "to",
        [l, name](kv_error* e) { return kv_library_rename(l, "a", name, e); });
    add("kv_library_rename", "from",
        [l, name](kv_error* e) { return kv_library_rename(l, name, "a", e); });
    add("kv_library_remove", "name",
        [l, name](kv_error* e) { return kv_library_remove(l, name, e); });
  }
  add("kv_library_rename", "library",
      [](kv_error* e) { return kv_library_rename(nullptr, "a", "b", e); });
  add("kv_library_rename", "from",
      [l](kv_error* e) { return kv_library_rename(l, nullptr, "b", e); });
  add("kv_library_rename", "to",
      [l](kv_error* e) { return kv_library_rename(l, "a", nullptr, e); });
  add(
      "kv_library_rename", "none of that name",
      [l](kv_error* e) { return kv_library_rename(l, "a", "b", e); }, KV_NOT_FOUND);
  add("kv_library_remove", "library",
      [](kv_error* e) { return kv_library_remove(nullptr, "a", e); });
  add("kv_library_remove", "name", [l](kv_error* e) { return kv_library_remove(l, nullptr, e); });
  add(
      "kv_library_remove", "none of that name",
      [l](kv_error* e) { return kv_library_remove(l, "a", e); }, KV_NOT_FOUND);
}

}  // namespace api_test
