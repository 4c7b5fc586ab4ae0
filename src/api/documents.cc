// kv_library_*: a folder of documents.
#include <mutex>
#include <vector>

#include "api/handles.h"
#include "library/library.h"

using namespace kvasir;

struct kv_library {
  std::unique_ptr<Library> library;
  std::mutex listing;  // guards listed
  std::vector<LibraryDocument> listed;
};

namespace {

kv_library_document to_public(const LibraryDocument& d) {
  kv_library_document out{};
  out.status = static_cast<kv_status>(d.damage.code());
  out.file_bytes = d.bytes;
  out.tokens = d.identity.tokens;
  out.last_used = d.used_ns;
  api::copy_text(out.name, d.name);
  if (!d.damage.ok()) return out;
  api::copy_shown(out.model_name, d.identity.model_name);
  api::copy_text(out.fingerprint, api::hexadecimal(d.identity.model));
  return out;
}

kv_library_result to_public(const LibraryOutcome& o) {
  kv_library_result out{};
  out.save_status = static_cast<kv_status>(o.save_failure.code());
  out.tokens = o.tokens;
  out.tokens_found = o.found_tokens;
  out.saved = o.saved;
  api::copy_text(out.name, o.name);
  return out;
}

Status request_of(const kv_library_session_options& o, const api::Control& c, std::string_view text,
                  LibraryRequest* out) {
  RETURN_IF_ERROR(api::check_flags(o.flags, KV_TOKENIZE_SPECIAL | KV_VERIFY | KV_REPLACE));
  RETURN_IF_ERROR(api::session_options(o.session, &out->session));
  out->text = text;
  out->parse_special = o.flags & KV_TOKENIZE_SPECIAL;
  out->verify = o.flags & KV_VERIFY;
  out->replace = o.flags & KV_REPLACE;
  if (o.name) {
    out->name = o.name;
    RETURN_IF_ERROR(Library::check_name(out->name));
  }
  out->cancel = c.cancel;
  out->verifying = c.report(KV_PHASE_VERIFY);
  out->reading = c.report(KV_PHASE_PREFILL);
  out->preparing = c.report(KV_PHASE_PREPARE);
  out->saving = c.report(KV_PHASE_SAVE);
  return {};
}

}  // namespace

extern "C" {

kv_status kv_library_open(const char* folder, const kv_library_options* options, kv_library** out,
                          kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!folder) return Status::error(Code::bad_argument, "folder is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    kv_library_options o;
    RETURN_IF_ERROR(api::read_options(options, &o));
    RETURN_IF_ERROR(api::check_flags(o.flags, 0));
    auto handle = std::make_unique<kv_library>();
    if (Status s = Library::open(folder, {o.max_bytes, api::log_function(o.log, o.log_user)},
                                 &handle->library);
        !s.ok())
      return s;
    *out = handle.release();
    return {};
  });
}

void kv_library_close(kv_library* library) { api::close(library); }

kv_status kv_library_list(kv_library* library, uint32_t index, kv_library_document* document,
                          kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!library) return Status::error(Code::bad_argument, "library is NULL");
    if (Status s = api::check_result(document, "document"); !s.ok()) return s;
    const std::lock_guard lock(library->listing);
    if (index == 0) {
      std::vector<LibraryDocument> listed;
      if (Status s = library->library->list(&listed); !s.ok()) return s;
      library->listed = std::move(listed);
    }
    if (index >= library->listed.size())
      return Status::error(Code::not_found, "there are %zu documents", library->listed.size());
    return api::write_result(to_public(library->listed[index]), document, "document");
  });
}

kv_status kv_library_session(kv_library* library, kv_model* model, const char* text, size_t size,
                             const kv_library_session_options* options, const kv_control* control,
                             kv_session** out, kv_library_result* result, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!library) return Status::error(Code::bad_argument, "library is NULL");
    RETURN_IF_ERROR(api::check_model(model));
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    if (Status s = api::check_text(text, size, "text"); !s.ok()) return s;
    if (result)
      if (Status s = api::check_result(result, "result"); !s.ok()) return s;
    kv_library_session_options o;
    api::Control c;
    RETURN_IF_ERROR(api::read_options(options, &o));
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    LibraryRequest request;
    RETURN_IF_ERROR(request_of(o, c, {text, size}, &request));
    auto handle = std::make_unique<kv_session>();
    LibraryOutcome outcome;
    if (Status s = library->library->session(model->model, request, &handle->session, &outcome);
        !s.ok())
      return s;
    *out = handle.release();
    return result ? api::write_result(to_public(outcome), result, "result") : Status();
  });
}

kv_status kv_library_compose(kv_library* library, kv_model* model, const char* const* names,
                             size_t count, const kv_compose_options* options,
                             const kv_control* control, kv_session** out, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!library) return Status::error(Code::bad_argument, "library is NULL");
    RETURN_IF_ERROR(api::check_model(model));
    if (!names && count > 0) return Status::error(Code::bad_argument, "names is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    kv_compose_options o;
    api::Control c;
    RETURN_IF_ERROR(api::read_options(options, &o));
    RETURN_IF_ERROR(api::read_control(control, 0, &c));
    LibraryComposition request;
    RETURN_IF_ERROR(api::session_options(o.session, &request.session));
    request.max_documents = o.max_documents;
    request.cancel = c.cancel;
    for (size_t i = 0; i < count; ++i) {
      if (!names[i]) return Status::error(Code::bad_argument, "name %zu is NULL", i);
      RETURN_IF_ERROR(Library::check_name(request.names.emplace_back(names[i])));
    }
    auto handle = std::make_unique<kv_session>();
    RETURN_IF_ERROR(library->library->compose(model->model, request, &handle->session));
    *out = handle.release();
    return {};
  });
}

kv_status kv_library_rename(kv_library* library, const char* from, const char* to,
                            kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!library) return Status::error(Code::bad_argument, "library is NULL");
    if (!from || !to) return Status::error(Code::bad_argument, "%s is NULL", from ? "to" : "from");
    return library->library->rename(from, to);
  });
}

kv_status kv_library_remove(kv_library* library, const char* name, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!library) return Status::error(Code::bad_argument, "library is NULL");
    if (!name) return Status::error(Code::bad_argument, "name is NULL");
    return library->library->remove(name);
  });
}

}  // extern "C"
