// kv_save, kv_load, what is asked of a cache file, and packed copies of it.
#include "api/handles.h"
#include "cachefile/cache_peek.h"
#include "cachefile/pack.h"

using namespace kvasir;

extern "C" {

kv_status kv_save(kv_session* session, const char* path, const kv_call_options* options,
                  kv_error* error) {
  return api::exclusive(session, error, [&](Session& s) -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    kv_call_options o;
    if (Status e = api::read_options(options, kv_call_options_init, &o); !e.ok()) return e;
    if (Status e = api::check_flags(o.flags, 0); !e.ok()) return e;
    return s.save(path, api::flag_of(o.cancel),
                  api::progress_report(o.progress, o.progress_user, KV_PHASE_SAVE),
                  api::progress_report(o.progress, o.progress_user, KV_PHASE_PREPARE));
  });
}

kv_status kv_load(kv_model* model, const char* path, const kv_session_options* session_options,
                  const kv_call_options* options, kv_session** out, kv_error* error) {
  return kv_load_prefix(model, path, 0, session_options, options, out, error);
}

kv_status kv_load_prefix(kv_model* model, const char* path, uint64_t tokens,
                         const kv_session_options* session_options, const kv_call_options* options,
                         kv_session** out, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!model) return Status::error(Code::bad_argument, "model is NULL");
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    SessionOptions so;
    if (Status s = api::session_options(session_options, &so); !s.ok()) return s;
    kv_call_options o;
    if (Status s = api::read_options(options, kv_call_options_init, &o); !s.ok()) return s;
    if (Status s = api::check_flags(o.flags, KV_LOAD_VERIFY); !s.ok()) return s;
    const Cancel* cancel = api::flag_of(o.cancel);
    auto handle = std::make_unique<kv_session>();
    if (Status s = Session::load(
            model->model, path, so, o.flags & KV_LOAD_VERIFY, cancel,
            api::progress_report(o.progress, o.progress_user, KV_PHASE_VERIFY), &handle->session,
            tokens, api::progress_report(o.progress, o.progress_user, KV_PHASE_PREFILL));
        !s.ok())
      return s;
    *out = handle.release();
    return {};
  });
}

kv_status kv_file_inspect(const char* path, kv_file_information* info, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    CachePeek file;
    if (Status s = CachePeek::open(path, &file); !s.ok()) return s;
    SavedSequence saved;
    ChatRecord chat;
    if (Status s = read_saved(file, &saved); !s.ok()) return s;
    if (Status s = read_chat(file, &chat); !s.ok()) return s;
    kv_file_information i{};
    i.format_version = file.header().version;
    i.file_bytes = file.size();
    i.tokens = file.identity().tokens;
    i.sealed_tokens = saved.sealed_tokens();
    for (format::SectionKind kind : PageStore::sections)
      if (const CachePeek::Section* section = file.find(kind)) i.kv_bytes += section->bytes;
    i.layers = file.identity().layers;
    i.kv_heads = file.identity().kv_heads;
    i.head_dim = file.identity().head_dim;
    i.kv_type = saved.full_precision ? KV_KV_F32 : KV_KV_INT8;
    api::copy_shown(i.model_name, file.identity().model_name);
    api::copy_text(i.chat_format, chat.format);
    return api::write_result(i, info, "info");
  });
}

kv_status kv_file_verify(const char* path, const kv_call_options* options, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    kv_call_options o;
    if (Status s = api::read_options(options, kv_call_options_init, &o); !s.ok()) return s;
    if (Status s = api::check_flags(o.flags, 0); !s.ok()) return s;
    CachePeek file;
    if (Status s = CachePeek::open(path, &file); !s.ok()) return s;
    Progress progress(api::progress_report(o.progress, o.progress_user, KV_PHASE_VERIFY));
    return file.verify(&progress, api::flag_of(o.cancel));
  });
}

void kv_pack_options_init(kv_pack_options* options, size_t size) {
  api::write_defaults(kv_pack_options{}, options, size);
}

static Status packing(const char* path, const char* packed_path, const kv_pack_options* options,
                      kv_pack_options* o) {
  if (!path) return Status::error(Code::bad_argument, "path is NULL");
  if (!packed_path) return Status::error(Code::bad_argument, "packed_path is NULL");
  return api::read_options(options, kv_pack_options_init, o);
}

kv_status kv_pack(const char* path, const char* packed_path, const kv_pack_options* options,
                  kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    kv_pack_options o;
    if (Status s = packing(path, packed_path, options, &o); !s.ok()) return s;
    if (o.level > max_level)
      return Status::error(Code::bad_argument, "level is %u: write 1 to %u, or 0", o.level,
                           max_level);
    Progress progress(api::progress_report(o.progress, o.progress_user, KV_PHASE_PACK));
    return pack(path, packed_path, o.level == 0 ? default_level : o.level, &progress,
                api::flag_of(o.cancel));
  });
}

kv_status kv_unpack(const char* packed_path, const char* path, const kv_pack_options* options,
                    kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    kv_pack_options o;
    if (Status s = packing(path, packed_path, options, &o); !s.ok()) return s;
    if (o.level != 0)
      return Status::error(Code::bad_argument, "level is %u: it is for packing", o.level);
    Progress progress(api::progress_report(o.progress, o.progress_user, KV_PHASE_UNPACK));
    return unpack(packed_path, path, &progress, api::flag_of(o.cancel));
  });
}

kv_status kv_packed_inspect(const char* path, kv_packed_information* info, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!path) return Status::error(Code::bad_argument, "path is NULL");
    PackedHeader header;
    if (Status s = read_packed_header(path, &header); !s.ok()) return s;
    kv_packed_information i{};
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
