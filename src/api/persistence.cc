// Files: save, load, inspect, verify, pack.
#include <algorithm>
#include <vector>

#include "api/handles.h"
#include "cachefile/cache_peek.h"
#include "cachefile/pack.h"
#include "session/saved_checkpoints.h"
#include "session/saved_documents.h"
#include "session/saved_drafts.h"
#include "session/saved_states.h"

using namespace kvasir;

namespace kvasir::api {

static Status read_paths(const char* const* paths, size_t count, std::vector<std::string>* out) {
  if (!paths && count > 0) return Status::error(Code::bad_argument, "paths is NULL");
  for (size_t i = 0; i < count; ++i) {
    if (!paths[i]) return Status::error(Code::bad_argument, "path %zu is NULL", i);
    out->emplace_back(paths[i]);
  }
  return {};
}

}  // namespace kvasir::api

extern "C" {

kv_status kv_save(kv_session* session, const char* path, const kv_control* control,
                  kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    api::Control c;
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    return s.save(path, c.cancel, c.report(KV_PHASE_SAVE), c.report(KV_PHASE_PREPARE));
  });
}

kv_status kv_load(kv_model* model, const char* path, const kv_session_options* options,
                  const kv_control* control, kv_session** out, kv_error* error) {
  return kv_load_prefix(model, path, 0, options, control, out, error);
}

kv_status kv_load_prefix(kv_model* model, const char* path, uint64_t tokens,
                         const kv_session_options* options, const kv_control* control,
                         kv_session** out, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    RETURN_IF_ERROR(api::check_model(model));
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    SessionOptions o;
    api::Control c;
    RETURN_IF_ERROR(api::session_options(options, &o));
    RETURN_IF_ERROR(api::read_control(control, KV_VERIFY, &c));
    auto handle = std::make_unique<kv_session>();
    RETURN_IF_ERROR(Session::load(model->model, path, o, c.has(KV_VERIFY), c.cancel,
                                  c.report(KV_PHASE_VERIFY), &handle->session, tokens,
                                  c.report(KV_PHASE_PREFILL)));
    *out = handle.release();
    return {};
  });
}

kv_status kv_session_compose(kv_model* model, const char* const* paths, size_t count,
                             const kv_compose_options* options, const kv_control* control,
                             kv_session** out, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    RETURN_IF_ERROR(api::check_model(model));
    if (!paths && count > 0) return Status::error(Code::bad_argument, "paths is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    kv_compose_options o;
    SessionOptions session;
    api::Control c;
    RETURN_IF_ERROR(api::read_options(options, &o));
    RETURN_IF_ERROR(api::session_options(o.session, &session));
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    std::vector<std::string> names;
    RETURN_IF_ERROR(api::read_paths(paths, count, &names));
    auto handle = std::make_unique<kv_session>();
    RETURN_IF_ERROR(Session::compose(model->model, {names, o.max_documents, c.cancel, {}}, session,
                                     &handle->session));
    *out = handle.release();
    return {};
  });
}

kv_status kv_session_get_document(kv_session* session, uint32_t index,
                                  kv_session_document* document, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    RETURN_IF_ERROR(api::check_result(document, "document"));
    DocumentReport report;
    RETURN_IF_ERROR(s.document(index, &report));
    kv_session_document d{};
    d.flags = (report.is_candidate ? KV_DOCUMENT_CANDIDATE : 0u) |
              (report.is_chosen ? KV_DOCUMENT_ATTENDED : 0u);
    d.tokens = report.tokens;
    d.score = report.score;
    d.path = report.path;
    return api::write_result(d, document, "document");
  });
}

kv_status kv_session_document_tokens(kv_session* session, uint32_t index, int32_t* tokens,
                                     size_t capacity, size_t* count, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    DocumentReport report;
    RETURN_IF_ERROR(s.document(index, &report));
    const std::span<const Token> all = s.document_tokens(index);
    return api::write_array(all.data(), all.size(), tokens, capacity, count);
  });
}

kv_status kv_session_limit_documents(kv_session* session, const uint32_t* documents, size_t count,
                                     kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    if (!documents && count > 0) return Status::error(Code::bad_argument, "documents is NULL");
    return s.set_candidates({documents, count});
  });
}

kv_status kv_session_set_documents(kv_session* session, const char* const* paths, size_t count,
                                   const kv_control* control, kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    std::vector<std::string> names;
    api::Control c;
    RETURN_IF_ERROR(api::read_paths(paths, count, &names));
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    return s.replace_documents(names, c.cancel);
  });
}

kv_status kv_file_inspect(const char* path, kv_file_info* info, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    CachePeek file;
    if (Status s = CachePeek::open(path, &file); !s.ok()) return s;
    SavedSequence saved;
    ChatRecord chat;
    if (Status s = read_saved(file, &saved); !s.ok()) return s;
    if (Status s = read_chat(file, &chat); !s.ok()) return s;
    kv_file_info i{};
    i.format_version = file.header().version;
    i.file_bytes = file.size();
    i.tokens = file.identity().tokens;
    i.sealed_tokens = saved.sealed_tokens();
    using format::SectionKind;
    for (SectionKind kind :
         {SectionKind::pages, SectionKind::scales, SectionKind::bounds, SectionKind::windows_pages,
          SectionKind::windows_scales, SectionKind::drafts_pages, SectionKind::drafts_scales})
      if (const CachePeek::Section* section = file.find(kind)) i.kv_bytes += section->bytes;
    i.layers = file.identity().layers + file.identity().windows.layers;
    i.kv_heads = file.identity().kv_heads;
    i.head_dim = file.identity().head_dim;
    i.precision = saved.full_precision ? KV_PRECISION_F32 : KV_PRECISION_INT8;
    api::copy_shown(i.model_name, file.identity().model_name);
    api::copy_text(i.chat_format, chat.format);
    StatesSummary states;
    RETURN_IF_ERROR(summarise_states(file, &states));
    i.recurrent_layers = states.layers;
    i.states = states.states;
    i.state_bytes = states.bytes;
    std::vector<uint64_t> checkpoints;
    RETURN_IF_ERROR(list_checkpoints(file, &checkpoints));
    i.checkpoints = checkpoints.size();
    std::copy(checkpoints.begin(), checkpoints.end(), i.checkpoint_tokens);
    RETURN_IF_ERROR(count_saved_drafts(file, &i.mtp_tokens));
    SavedDocuments documents;
    RETURN_IF_ERROR(read_documents(file, &documents));
    i.documents = documents.documents.size();
    return api::write_result(i, info, "info");
  });
}

kv_status kv_file_get_document(const char* path, uint32_t index, kv_file_document* document,
                               kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    RETURN_IF_ERROR(api::check_result(document, "document"));
    CachePeek file;
    RETURN_IF_ERROR(CachePeek::open(path, &file));
    SavedDocuments saved;
    RETURN_IF_ERROR(read_documents(file, &saved));
    if (index >= saved.documents.size())
      return Status::error(Code::not_found, "%s refers to %zu documents", path,
                           saved.documents.size());
    const SavedDocument& of = saved.documents[index];
    auto d = std::make_unique<kv_file_document>();
    std::string place;
    const Status found = find_document(path, saved, index, &place);
    d->flags =
        (of.is_candidate ? KV_DOCUMENT_CANDIDATE : 0u) | (of.is_chosen ? KV_DOCUMENT_ATTENDED : 0u);
    d->tokens = of.tokens;
    d->file_bytes = of.stamp.bytes;
    d->status = static_cast<kv_status>(found.code());
    api::copy_text(d->path, place);
    return api::write_result(*d, document, "document");
  });
}

kv_status kv_file_verify(const char* path, const kv_control* control, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    api::Control c;
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    CachePeek file;
    RETURN_IF_ERROR(CachePeek::open(path, &file));
    Progress progress(c.report(KV_PHASE_VERIFY));
    return file.verify(&progress, c.cancel);
  });
}

static Status check_paths(const char* path, const char* packed_path) {
  if (!path) return Status::error(Code::bad_argument, "path is NULL");
  if (!packed_path) return Status::error(Code::bad_argument, "packed_path is NULL");
  return {};
}

kv_status kv_pack(const char* path, const char* packed_path, uint32_t level,
                  const kv_control* control, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    api::Control c;
    RETURN_IF_ERROR(check_paths(path, packed_path));
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    if (level > max_level)
      return Status::error(Code::bad_argument, "level is %u: use 1 to %u, or 0", level, max_level);
    Progress progress(c.report(KV_PHASE_PACK));
    return pack(path, packed_path, level == 0 ? default_level : level, &progress, c.cancel);
  });
}

kv_status kv_unpack(const char* packed_path, const char* path, const kv_control* control,
                    kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    api::Control c;
    RETURN_IF_ERROR(check_paths(path, packed_path));
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    Progress progress(c.report(KV_PHASE_UNPACK));
    return unpack(packed_path, path, &progress, c.cancel);
  });
}

kv_status kv_packed_inspect(const char* path, kv_packed_info* info, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    PackedHeader header;
    if (Status s = read_packed_header(path, &header); !s.ok()) return s;
    kv_packed_info i{};
    i.packed_version = header.version;
    i.file_bytes = header.packed_bytes;
    i.document_bytes = header.document_bytes;
    i.tokens = header.identity.tokens;
    i.format_version = header.format_version;
    i.level = header.level;
    i.layers = header.identity.layers;
    i.kv_heads = header.identity.kv_heads;
    i.head_dim = header.identity.head_dim;
    api::copy_shown(i.model_name, header.identity.model_name);
    return api::write_result(i, info, "info");
  });
}

}  // extern "C"
