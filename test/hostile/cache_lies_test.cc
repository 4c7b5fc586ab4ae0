// Sparse and lying caches, generated from the format's own tables (cachefile/format_fields.h,
// cachefile/section_sizes.h): every length, count, offset, version and choice is replaced by each
// of the lies for it, layout and checksums repaired, and every call that takes a cache refuses the
// file, or takes it, for 64 MB and 100 ms of CPU time.
//
// The environment variable KVASIR_HOSTILE_STRIDE says of how many cases one is tried; without it
// of 41.
#include <cstdlib>
#include <functional>

#include "api/cache_helpers.h"
#include "cachefile/cache_peek.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_sizes.h"
#include "fault_count.h"
#include "hostile/cache_image.h"
#include "hostile/lies.h"
#include "hostile/measure.h"
#include "store/key_sketch.h"

using namespace api_test;
using namespace hostile;
using format::FieldIs;
using format::SectionKind;
using kvasir::CacheHeader;

namespace {

struct Case {
  std::string what;
  std::function<void(CacheImage*)> lie;
};

bool is_lied_about(const format::Field& field) {
  return field.bytes <= 8 && field.is != FieldIs::data && field.is != FieldIs::checksum;
}

// All lies about an honest file.
class Lies {
 public:
  explicit Lies(const CacheImage& honest) : honest_(honest) {
    about_header();
    for (uint32_t i = 0; i < honest.header.section_count; ++i) about_section(i);
    about_whole_sequences();
  }
  const std::vector<Case>& cases() const { return cases_; }

 private:
  void add(std::string what, std::function<void(CacheImage*)> lie) {
    cases_.push_back({std::move(what), std::move(lie)});
  }

  void patch(const std::string& what, const format::Field& field, uint64_t base,
             const std::vector<uint8_t>& begin, uint64_t plausible) {
    const uint64_t at = base + field.offset, bytes = field.bytes;
    for (const uint64_t lie : lies(samples::get(begin, at, static_cast<int>(bytes)), plausible,
                                   static_cast<uint32_t>(bytes)))
      add(what + " " + field.name + " " + std::to_string(lie), [=](CacheImage* image) {
        image->patches.push_back({at, bytes, lie});
      });
  }

  void about_header() {
    std::vector<uint8_t> begin(format::header_bytes);
    honest_.header.encode(std::span<uint8_t, format::header_bytes>(begin));
    for (const format::Field& field : format::header_fields)
      if (is_lied_about(field))
        patch("header", field, 0, begin, honest_.header.identity.tokens * 2);
    for (uint32_t i = 0; i < honest_.header.section_count; ++i)
      for (const format::Field& field : format::entry_fields)
        if (is_lied_about(field))
          patch(std::string("entry ") + format::name_of(honest_.header.sections[i].kind), field,
                format::header_at("sections") + i * format::entry_bytes, begin, most(i));
  }

  uint64_t most(uint32_t i) const {
    return kvasir::max_section_bytes(honest_.header.sections[i].kind, honest_.header.identity);
  }

  void fields(SectionKind kind, std::span<const format::Field> all, uint64_t base) {
    for (const format::Field& field : all) {
      const uint64_t at = base + field.offset, bytes = field.bytes;
      if (!is_lied_about(field) || at + bytes > honest_.sections[honest_.index_of(kind)].size())
        continue;
      for (const uint64_t lie : lies(honest_.get(kind, at, bytes), honest_.header.identity.tokens,
                                     static_cast<uint32_t>(bytes)))
        add(std::string(format::name_of(kind)) + " " + field.name + " " + std::to_string(lie),
            [=](CacheImage* image) { image->put(kind, at, bytes, lie); });
    }
  }

  void about_section(uint32_t i) {
    const CacheHeader::Entry& entry = honest_.header.sections[i];
    for (const uint64_t lie : lies(entry.bytes, most(i), 8))
      add(std::string(format::name_of(entry.kind)) + " of " + std::to_string(lie) + " bytes",
          [=](CacheImage* image) { image->resize(i, lie); });
    fields(entry.kind, format::fields_of(entry.kind), 0);
    const kvasir::PageShape page = kvasir::PageShape::of(honest_.header.identity.head_dim);
    const uint64_t heads =
        uint64_t{honest_.header.identity.layers} * honest_.header.identity.kv_heads;
    if (entry.kind == SectionKind::sketch)
      fields(entry.kind, format::sketch_fields,
             2 * heads * page.dim * page.sketch_dim() * sizeof(float));
    if (format::fields_of(entry.kind).data() == format::index_fields.data() && entry.bytes > 0) {
      const uint64_t graphs = honest_.get(entry.kind, 20, 4);
      fields(entry.kind, format::index_word_fields,
             kvasir::round_up(format::index_head_bytes + heads * graphs * sizeof(uint64_t), 4096));
    }
  }

  // Sequences of more tokens than there are, each number of which agrees with all others.
  void about_whole_sequences() {
    const uint64_t page_tokens =
        honest_.get(SectionKind::state, format::state_at("page tokens"), 4);
    for (const uint64_t extents : {uint64_t{1}, uint64_t{64}, uint64_t{1} << 12, uint64_t{1} << 17,
                                   uint64_t{1} << 22, uint64_t{1} << 30})
      add("sequence of " + std::to_string(extents) + " more extents", [=](CacheImage* image) {
        const uint64_t pages =
            image->get(SectionKind::state, format::state_at("pages"), 4) + 16 * extents;
        const uint64_t tokens = image->header.identity.tokens += 16 * extents * page_tokens;
        image->put(SectionKind::state, format::state_at("pages"), 4, pages);
        image->put(SectionKind::state, format::state_at("tokens"), 8, tokens);
        const kvasir::PageShape page = kvasir::PageShape::of(image->header.identity.head_dim);
        const uint64_t heads =
            uint64_t{image->header.identity.layers} * image->header.identity.kv_heads;
        const auto grow = [&](SectionKind kind, uint64_t bytes) {
          const std::size_t i = image->index_of(kind);
          if (i < image->sections.size() && !image->sections[i].empty())
            image->resize(i, image->header.sections[i].bytes + bytes);
        };
        grow(SectionKind::tokens, 16 * extents * page_tokens * sizeof(int32_t));
        grow(SectionKind::pages, extents * heads * kvasir::PageShape::pages_bytes());
        grow(SectionKind::scales, extents * heads * page.scales_bytes());
        grow(SectionKind::bounds, extents * heads * page.bounds_bytes());
        grow(SectionKind::sketch, extents * heads * page.sketch_bytes());
        grow(SectionKind::chain, extents * page_tokens / 16 * sizeof(uint64_t));
        grow_windows(image, extents);
        move_state(image, tokens);
      });
  }

  // The last state of recurrent layers belongs to the end of the sequence.
  static void move_state(CacheImage* image, uint64_t tokens) {
    if (image->index_of(SectionKind::recurrent) == image->sections.size()) return;
    const uint64_t states = image->get(SectionKind::recurrent, format::recurrent_at("states"), 4);
    const uint64_t first = format::recurrent_at("tokens of the first state");
    image->put(SectionKind::recurrent, first + 8 * (states - 1), 8, tokens);
  }

  // The windows of a sequence that is so many extents longer, none of which is missing.
  static void grow_windows(CacheImage* image, uint64_t extents) {
    const format::WindowsShape& shape = image->header.identity.windows;
    if (shape.layers == 0) return;
    const auto add = [&](uint64_t at, uint64_t count) {
      image->put(SectionKind::windows, at, 4, image->get(SectionKind::windows, at, 4) + count);
    };
    add(format::windows_at("pages"), 16 * extents);
    const uint64_t runs = image->get(SectionKind::windows, format::windows_at("runs"), 4);
    add(format::windows_at("end of the first run") + 8 * (runs - 1), extents);
    const kvasir::PageShape page = kvasir::PageShape::of(shape.head_dim);
    const uint64_t heads = uint64_t{shape.layers} * shape.kv_heads;
    for (const auto& [kind, bytes] :
         {std::pair(SectionKind::windows_pages, kvasir::PageShape::pages_bytes()),
          std::pair(SectionKind::windows_scales, page.scales_bytes())}) {
      const std::size_t i = image->index_of(kind);
      image->resize(i, image->header.sections[i].bytes + extents * heads * bytes);
    }
  }

  const CacheImage& honest_;
  std::vector<Case> cases_;
};

// Fires at the first report: a call over a large file need not come to its end.
struct Stop {
  kv_cancel* cancel = nullptr;
  static int32_t report(int32_t, uint64_t, uint64_t, void* user) {
    kv_cancel_fire(static_cast<Stop*>(user)->cancel);
    return 0;
  }
};

bool is_answer(kv_status s) {
  return s == KV_OK || s == KV_CORRUPT || s == KV_VERSION || s == KV_NOT_A_CACHE ||
         s == KV_MODEL_MISMATCH || s == KV_CONTEXT_FULL;
}

// What was taken is saved as a file that can be loaded, or not at all.
void use(kv_model* model, kv_session* session, const std::string& folder) {
  (void)ask(session, "q", 1);
  (void)kv_session_rewind(session, sequence(session).size() / 2, nullptr);
  const std::string again = folder + "/again.kv";
  if (kv_save(session, again.c_str(), nullptr, nullptr) != KV_OK) return;
  const kv_session_options o = small_options();
  kv_session* loaded = nullptr;
  kv_error error{};
  CHECK_MESSAGE(kv_load(model, again.c_str(), &o, nullptr, &loaded, &error) == KV_OK,
                error.message);
  kv_session_close(loaded);
}

class Readers {
 public:
  // model: of the sequence, or null. drafts: option draft_tokens of its sessions.
  Readers(std::string folder, std::string path, kv_model* model, uint32_t drafts)
      : folder_(std::move(folder)), path_(std::move(path)), model_(model), drafts_(drafts) {}

  void run() {
    const bool is_large = std::filesystem::file_size(in_utf8(path_)) > (uint64_t{16} << 20);
    kv_status status = KV_OK;
    const auto cheap = [&](const char* call, const std::function<kv_status()>& f) {
      Cost cost = measure([&] { status = f(); });
      if (!is_cheap(cost))
        cost = measure([&] { status = f(); });  // another process may have taken the file's memory
      CHECK_MESSAGE(is_cheap(cost), call, ": ", to_text(cost));
      CHECK_MESSAGE((is_answer(status) || (is_large && status == KV_CANCELLED)), call, ": ",
                    status);
    };
    cheap("kv_file_inspect", [&] {
      kv_file_info info{};
      info.struct_size = sizeof info;
      return kv_file_inspect(path_.c_str(), &info, nullptr);
    });
    const Cancel cancel = make_cancel();
    Stop stop{cancel.get()};
    kv_control call;
    kv_init(&call, sizeof call);
    if (is_large) call.cancel = cancel.get(), call.progress = Stop::report, call.user = &stop;
    cheap("kv_file_verify", [&] { return kv_file_verify(path_.c_str(), &call, nullptr); });
    if (is_large)
      cheap("kv_pack", [&] {
        return kv_pack(path_.c_str(), (folder_ + "/a.kvz").c_str(), 0, &call, nullptr);
      });
    cheap("peek", [&] {
      kvasir::CachePeek peek;
      kvasir::TokenChain chain;
      kvasir::Array<int32_t> tokens;
      uint64_t count = 0;
      if (!kvasir::CachePeek::open(path_, &peek).ok()) return KV_CORRUPT;
      const bool both =
          peek.read_chain(1000, &chain, &count).ok() && peek.read_tokens(1000, &tokens).ok();
      return both ? KV_OK : KV_CORRUPT;
    });
    cheap("kv_file_get_document", [&] {
      kv_file_document document;
      kv_init(&document, sizeof document);
      const kv_status s = kv_file_get_document(path_.c_str(), 1, &document, nullptr);
      return s == KV_NOT_FOUND ? KV_OK : s;
    });
    kv_cancel_reset(cancel.get());
    for (const uint32_t flags : {uint32_t{KV_VERIFY}, 0u}) {
      call.flags = flags;
      if (!flags) call.cancel = nullptr;
      cheap(flags ? "load, verifying" : "load",
            [&] { return model_ ? load_session(&call) : load_cache(&call); });
      if (session_) use(model_, session_.get(), folder_);
      session_.reset();
    }
  }

 private:
  kv_status load_session(const kv_control* call) {
    kv_session_options o = small_options();
    o.draft_tokens = drafts_;
    kv_session* out = nullptr;
    const kv_status s = kv_load(model_, path_.c_str(), &o, call, &out, nullptr);
    session_.reset(out);
    return s;
  }
  kv_status load_cache(const kv_control* call) {
    const kv_cache_options o = options_of("quest", 64);
    kv_cache* out = nullptr;
    const kv_status s = kv_cache_load(&small, path_.c_str(), &o, call, &out, nullptr);
    kv_cache_close(out);
    return s;
  }

  std::string folder_, path_;
  kv_model* model_;
  uint32_t drafts_;
  Session session_;
};

uint64_t stride() {
  const char* given = std::getenv("KVASIR_HOSTILE_STRIDE");
  return given ? std::strtoull(given, nullptr, 10) : 41;
}

// Every stride-th lie about a file; the last ones are all tried: they are about whole sequences.
void try_lies(const std::vector<uint8_t>& file, kv_model* model, uint32_t drafts = 0,
              const std::string& place = "") {
  TempFolder folder;
  const std::string path = place.empty() ? folder.file("lie.kv") : place + "/lie.kv";
  const CacheImage honest(file);
  REQUIRE(honest.header.section_count > 5);
  const std::vector<Case> cases = Lies(honest).cases();
  Readers readers(folder.path(), path, model, drafts);
  REQUIRE(honest.write(path));
  readers.run();
  std::size_t tried = 0;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (i % stride() != 0 && i + 6 < cases.size()) continue;
    INFO(cases[i].what);
    CacheImage image = honest;
    cases[i].lie(&image);
    if (!image.write(path)) continue;
    count_faults("lengths, counts and offsets that lie, checksums repaired");
    readers.run();
    ++tried;
  }
  MESSAGE(tried, " of ", cases.size(), " lies");
  CHECK(tried >= cases.size() / stride() / 2);
}

std::vector<uint8_t> saved(std::size_t tokens, const char* strategy, uint32_t answer,
                           kv_model* model = tiny_model(), uint32_t flags = 0,
                           uint32_t drafts = 0) {
  TempFolder folder;
  kv_session_options o = small_options();
  o.decode = budgeted(strategy, 64);
  o.draft_tokens = drafts;
  const Session session = open_session(model, o);
  read_tokens(session.get(), some_tokens(tokens));
  if (answer > 0) REQUIRE(ask(session.get(), "q", answer, flags).status == KV_OK);
  save(session.get(), folder.file("a.kv"));
  return read_file(folder.file("a.kv"));
}

}  // namespace

TEST_CASE("every number of a saved sequence that lies is refused for little") {
  try_lies(saved(700, "bounded", 0), tiny_model());
}

TEST_CASE("every number of a sequence in the middle of an answer that lies is refused for little") {
  try_lies(saved(900, "snapkv", 5), tiny_model());
}

TEST_CASE("every number of an index that lies is refused for little") {
  for (const char* strategy : {"hnsw", "ood", "ivf"})
    try_lies(saved(2300, strategy, 0), tiny_model());
}

TEST_CASE("every number of windows that lies is refused for little") {
  const Model model = open_model(FIXTURES "/models/gemma3-linear.gguf");
  try_lies(saved(2300, "bounded", 5, model.get(), KV_KEEP_TURN), model.get());
}

TEST_CASE("every number of recurrent states that lies is refused for little") {
  const Model model = open_model(FIXTURES "/models/qwen35.gguf");
  try_lies(saved(2300, "bounded", 5, model.get(), KV_KEEP_TURN), model.get());
}

TEST_CASE("every number of an MTP layer's rows that lies is refused for little") {
  const Model model = open_model(FIXTURES "/models/qwen35-mtp.gguf");
  try_lies(saved(2300, "bounded", 5, model.get(), KV_KEEP_TURN, 2), model.get(), 2);
}

TEST_CASE("every number of references to documents that lies is refused for little") {
  TempFolder folder;
  std::vector<std::string> paths;
  for (const char* name : {"a.kv", "b.kv"}) {
    paths.push_back(folder.file(name));
    const Session session = open_session(tiny_model(), small_options());
    read_tokens(session.get(), some_tokens(700 + 100 * paths.size()));
    save(session.get(), paths.back());
  }
  kv_session* out = nullptr;
  const char* const files[] = {paths[0].c_str(), paths[1].c_str()};
  REQUIRE_OK(kv_session_compose(tiny_model(), files, 2, nullptr, nullptr, &out, error));
  const Session session(out);
  REQUIRE(ask(session.get(), "q", 5, KV_KEEP_TURN).status == KV_OK);
  // next to the documents, as each lie about it
  save(session.get(), folder.file("c.kv"));
  try_lies(read_file(folder.file("c.kv")), tiny_model(), 0, folder.path());
}

TEST_CASE("every number of a cache without a model that lies is refused for little") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Cache cache = open_cache(small, options_of("quest", 64));
  const Text text(small, 700);
  for (uint32_t at = 0; at < 700; at += 100)
    for (uint32_t l = 0; l < small.layers; ++l)
      REQUIRE_OK(kv_cache_update(cache.get(), l, KV_F32, text.key(l, at), text.value(l, at),
                                 text.query(l, at), 100, error));
  REQUIRE_OK(kv_cache_save(cache.get(), path.c_str(), nullptr, error));
  try_lies(read_file(path), nullptr);
}
