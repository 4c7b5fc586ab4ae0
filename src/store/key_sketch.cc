#include "store/key_sketch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "backend/second_moment.h"
#include "base/checked.h"
#include "base/stamp.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_floats.h"
#include "cachefile/section_rules.h"
#include "os/os.h"
#include "store/eigenvectors.h"

namespace kvasir {

using format::SectionKind;

namespace {

constexpr uint32_t sampled_tokens = 4096;  // tokens of a head for the second moment of its keys
constexpr uint32_t summed_tokens = 256;    // tokens summed in float; these sums are added in double
constexpr double known_queries = 0.5;      // their part of the second moment of queries
// Exponent of a coordinate's variance. Of 1/4, 1/3, 3/8 and 1/2 (which makes keys vary alike in all
// coordinates) it left the least error.
constexpr double scaled_by = 1.0 / 3;
// Relative to the largest variance; coordinates below it are not enlarged.
constexpr double min_variance = 1e-6;

using Square = std::vector<double>;  // [n][n]

double dot(const double* a, const double* b, uint32_t n) {
  double even = 0, odd = 0;
  for (uint32_t i = 0; i + 1 < n; i += 2) even += a[i] * b[i], odd += a[i + 1] * b[i + 1];
  return even + odd + (n % 2 ? a[n - 1] * b[n - 1] : 0);
}

double trace_of(const Square& a, uint32_t n) {
  double trace = 0;
  for (uint32_t i = 0; i < n; ++i) trace += a[i * n + i];
  return trace > 0 && trace < 1e300 ? trace : 0;  // also for NaN and infinity
}

// Replaces a by the lower L of L L^T = a, with zeros above.
void factor(Square& a, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    double* row = a.data() + std::size_t{i} * n;
    for (uint32_t j = 0; j < i; ++j)
      row[j] = (row[j] - dot(row, a.data() + std::size_t{j} * n, j)) / a[j * n + j];
    row[i] = std::sqrt(row[i] - dot(row, row, i));
    std::fill(row + i + 1, row + n, 0.0);
  }
}

// Scratch memory for finding the bases of a head, per thread.
struct BasisWorkspace {
  BasisWorkspace(uint32_t n, uint32_t m, uint32_t page_tokens)
      : keys(std::size_t{n} * n), queries(keys.size()), scaled(keys.size()), l(keys.size()),
        product(keys.size()), moment(keys.size()), base(std::size_t{n} * m),
        directions(std::size_t{n} * m), below(m), variances(m),
        rows(std::size_t{summed_tokens} * n), values(std::size_t{page_tokens} * n) {}
  Square keys, queries;                           // second moments, [n][n]; `queries` then holds L
  std::vector<float> scaled, l, product, moment;  // [n][n]
  std::vector<float> base, directions;            // [n][m]
  std::vector<double> below, variances;           // [m]
  Array<float> rows, values;  // [summed_tokens][n] keys; [page_tokens][n] values of a page
};

// Computes the second moment of a head's keys from a sample of its pages, and verifies all pages.
// at: layer * kv_heads + head. Returns false if a page of a mapped file is damaged.
bool add_keys(const PageStore& pages, uint32_t at, const Kernels& kernels,
              const CancelLatch& cancel, BasisWorkspace* w) {
  const StoreShape& shape = pages.shape();
  const uint32_t layer = at / shape.kv_heads, head = at % shape.kv_heads, dim = shape.page.dim,
                 page_tokens = shape.page.page_tokens, count = pages.pages();
  const auto stride =
      static_cast<uint32_t>(ceil_div(count, std::max(1u, sampled_tokens / page_tokens)));
  std::fill(w->keys.begin(), w->keys.end(), 0.0);
  uint32_t rows = 0;
  for (uint32_t p = 0; p < count; ++p) {
    if (cancel.fired()) return true;
    if (!pages.intact_page(layer, head, p)) return false;
    // The keys of the sinks are outliers that are never selected.
    if (p % stride != stride - 1 || (p == 0 && count > 1)) continue;
    const PageRef ref = pages.page(layer, head, p);
    kernels.unseal_page(shape.page, ref.data, ref.scales, w->rows.data() + std::size_t{rows} * dim,
                        w->values.data());
    rows += page_tokens;
    if (rows < summed_tokens) continue;
    add_moment(kernels, w->rows.data(), std::exchange(rows, 0), dim, w->product.data(),
               w->keys.data());
  }
  add_moment(kernels, w->rows.data(), rows, dim, w->product.data(), w->keys.data());
  return true;
}

// A and B of one head, [n][m], from the second moments of its keys and queries; see key_sketch.h.
void find_bases(const Kernels& kernels, BasisWorkspace* w, uint32_t n, uint32_t m, float* key_basis,
                float* query_basis) {
  const double query_trace = trace_of(w->queries, n), key_trace = trace_of(w->keys, n),
               known = query_trace > 0 ? known_queries : 0;
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t j = 0; j < n; ++j) {
      double& q = w->queries[i * n + j];
      q = (known > 0 ? known * q * n / query_trace : 0) + (i == j ? 1 - known : 0);
      w->scaled[i * n + j] =
          key_trace > 0 ? static_cast<float>(w->keys[i * n + j] * n / key_trace) : 0;
    }
  factor(w->queries, n);
  const Square& l = w->queries;
  std::transform(l.begin(), l.end(), w->l.begin(), [](double x) { return static_cast<float>(x); });
  kernels.multiply(w->scaled.data(), n, 1, n, w->l.data(), n, n, n, w->product.data(), n);  // K L
  // L^T K L
  kernels.multiply(w->l.data(), 1, n, n, w->product.data(), n, n, n, w->moment.data(), n);
  leading_eigenvectors(&w->moment, n, m, &w->directions, &w->variances);
  kernels.multiply(w->l.data(), n, 1, n, w->directions.data(), m, m, n, w->base.data(), m);  // L W
  const double largest = w->variances[0];
  std::vector<double>& scales = w->variances;
  for (double& v : scales)
    v = largest > 0 ? std::pow(std::max(v / largest, min_variance), scaled_by) : 1;
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t j = 0; j < m; ++j)
      key_basis[i * m + j] =
          static_cast<float>(static_cast<double>(w->base[i * m + j]) / scales[j]);
  for (uint32_t i = n; i-- > 0;) {  // L^-T W, from the last row up, in place of W
    std::fill(w->below.begin(), w->below.end(), 0.0);
    for (uint32_t k = i + 1; k < n; ++k) {
      const float* row = w->directions.data() + std::size_t{k} * m;
      const double share = l[k * n + i];
      for (uint32_t j = 0; j < m; ++j) w->below[j] += share * static_cast<double>(row[j]);
    }
    for (uint32_t j = 0; j < m; ++j) {
      const double x = (static_cast<double>(w->directions[i * m + j]) - w->below[j]) / l[i * n + i];
      w->directions[i * m + j] = static_cast<float>(x);
      query_basis[i * m + j] = static_cast<float>(x * scales[j]);
    }
  }
}

// Zeroes page p of an extent for all heads; page.h has the layout.
void clear_page(const StoreShape& shape, uint32_t p, int8_t* extent) {
  const PageShape& page = shape.page;
  const std::size_t lines = std::size_t{quad_tokens} * page.sketch_dim() / 8,
                    tile_bytes = lines * tile_blocks * 4;
  for (uint32_t at = 0; at < shape.heads_total(); ++at, extent += page.sketch_bytes())
    for (uint32_t i = p * page.page_quads(); i < (p + 1) * page.page_quads(); ++i) {
      int8_t* quad = extent + i / tile_blocks * tile_bytes + i % tile_blocks * 4;
      for (std::size_t line = 0; line < lines; ++line)
        std::memset(quad + line * tile_blocks * 4, 0, 4);
      std::memset(extent + page.quad_tiles() * tile_bytes + i * sizeof(uint16_t), 0,
                  sizeof(uint16_t));
    }
}

}  // namespace

KeySketch::Extent KeySketch::new_extent() const {
  auto* memory = static_cast<int8_t*>(allocate_zeroed(extent_bytes()));
  if (!memory) throw std::bad_alloc();
  std::shared_ptr<int8_t> owner(memory, [](int8_t* p) { deallocate(p); });
  return {memory, std::move(owner), new_stamp()};
}

void KeySketch::seal(Extent* extent, const PageStore& pages, const Bases& bases, uint32_t at,
                     uint32_t page, const Kernels& kernels) const {
  const PageRef ref = pages.page(at / shape_.kv_heads, at % shape_.kv_heads, page);
  kernels.seal_sketch(shape_.page, bases.floats.get() + at * basis_floats(), ref.data, ref.scales,
                      page % extent_pages, extent->memory.get() + at * shape_.page.sketch_bytes());
}

Status KeySketch::build(const PageStore& pages, const QueryMoment& queries, const Kernels& kernels,
                        ThreadPool* pool, const Cancel* cancel) {
  const uint32_t dim = shape_.page.dim, n = shape_.page.sketch_dim(), heads = shape_.heads_total(),
                 count = pages.pages();
  if (count == 0) return {};
  auto bases = std::make_shared<Bases>(2 * heads * basis_floats());
  std::vector<Extent> extents;
  extents.reserve(pages.extents());
  while (extents.size() < pages.extents()) extents.push_back(new_extent());

  std::vector<std::unique_ptr<BasisWorkspace>> scratch(pool->threads());
  for (std::unique_ptr<BasisWorkspace>& w : scratch)
    w = std::make_unique<BasisWorkspace>(dim, n, shape_.page.page_tokens);
  const CancelLatch latch(cancel);
  std::atomic<bool> intact{true};
  pool->run(heads, [&](uint32_t at, uint32_t worker) {
    const uint32_t layer = at / shape_.kv_heads, head = at % shape_.kv_heads;
    BasisWorkspace& w = *scratch[worker];
    if (!add_keys(pages, at, kernels, latch, &w)) intact = false;
    if (!intact || latch.fired()) return;
    std::fill(w.queries.begin(), w.queries.end(), 0.0);
    if (queries) queries(layer, head, w.queries.data());
    find_bases(kernels, &w, dim, n, bases->floats.get() + at * basis_floats(),
               bases->floats.get() + (heads + at) * basis_floats());
    for (uint32_t p = 0; p < count && !latch.fired(); ++p)
      seal(&extents[p / extent_pages], pages, *bases, at, p, kernels);
  });
  if (!intact) return pages.damaged();
  if (latch.fired())
    return Status::error(Code::cancelled, "cancelled; the sketch of the keys is unchanged");
  bases_ = std::move(bases);
  basis_stamp_ = new_stamp();
  extents_ = std::move(extents);
  file_.reset();
  pages_ = built_pages_ = count;
  return {};
}

Status KeySketch::reserve(uint32_t pages) {
  if (!built() || pages <= pages_) return {};
  const uint32_t last = pages_ / extent_pages;  // the extent of the next page
  extents_.resize(std::min<std::size_t>(extents_.size(), last + 1));
  if (last < extents_.size() && !(extents_[last].memory && is_sole(extents_[last].memory))) {
    Extent copy = new_extent();
    if (!extents_[last].memory)
      for (uint32_t at = 0; at < shape_.heads_total(); ++at)
        if (!intact(at / shape_.kv_heads, at % shape_.kv_heads, last)) return damaged();
    std::memcpy(copy.memory.get(), extents_[last].data, extent_bytes());
    extents_[last] = std::move(copy);
  }
  const std::size_t wanted = ceil_div(pages, extent_pages);
  extents_.reserve(wanted);
  while (extents_.size() < wanted) extents_.push_back(new_extent());
  return {};
}

void KeySketch::append(const PageStore& pages, const Kernels& kernels, ThreadPool* pool) {
  if (!built() || pages.pages() <= pages_) return;
  pool->run(shape_.heads_total(), [&](uint32_t at, uint32_t) {
    for (uint32_t p = pages_; p < pages.pages(); ++p)
      seal(&extents_[p / extent_pages], pages, *bases_, at, p, kernels);
  });
  for (uint32_t e = pages_ / extent_pages; e < pages.extents(); ++e)
    extents_[e].stamp = new_stamp();
  pages_ = pages.pages();
}

void KeySketch::truncate(uint32_t pages) {
  if (pages >= pages_) return;
  if (pages == 0) return clear();
  pages_ = pages;
  built_pages_ = std::min(built_pages_, pages);
  extents_.resize(ceil_div(pages, extent_pages));
}

void KeySketch::clear() {
  pages_ = built_pages_ = 0;
  bases_.reset();
  extents_.clear();
  file_.reset();
}

const int8_t* KeySketch::extent(uint32_t layer, uint32_t head, uint32_t e) const {
  return extents_[e].data +
         (std::size_t{layer} * shape_.kv_heads + head) * shape_.page.sketch_bytes();
}

const float* KeySketch::query_basis(uint32_t layer, uint32_t head) const {
  return bases_->floats.get() +
         (shape_.heads_total() + std::size_t{layer} * shape_.kv_heads + head) * basis_floats();
}

bool KeySketch::intact(uint32_t layer, uint32_t head, uint32_t e) const {
  if (extents_[e].memory) return true;
  const uint64_t at = extents_at_ + uint64_t{e} * extent_bytes() +
                      (uint64_t{layer} * shape_.kv_heads + head) * shape_.page.sketch_bytes();
  return file_->check(*file_->find(SectionKind::sketch), at, shape_.page.sketch_bytes());
}

Status KeySketch::copy(uint32_t e, uint32_t first, uint32_t heads, std::byte* to) const {
  const std::size_t at = first * shape_.page.sketch_bytes(),
                    size = heads * shape_.page.sketch_bytes();
  if (!extents_[e].memory)
    return file_->copy(*file_->find(SectionKind::sketch),
                       extents_at_ + uint64_t{e} * extent_bytes() + at, size, to);
  std::memcpy(to, extents_[e].data + at, size);
  return {};
}

Status KeySketch::damaged() const {
  if (file_) RETURN_IF_ERROR(file_->failure());
  return Status::error(Code::internal, "a sketch was reported as damaged and is not");
}

uint64_t KeySketch::private_bytes() const {
  uint64_t bytes = bases_ ? bases_->size * sizeof(float) : 0;
  for (const Extent& e : extents_) bytes += e.memory ? extent_bytes() : 0;
  return bytes;
}

uint64_t KeySketch::head_bytes() const {
  return round_up(basis_bytes() + format::sketch_counts_bytes, format::block_bytes);
}

uint64_t KeySketch::file_bytes() const {
  return built() ? head_bytes() + ceil_div(pages_, extent_pages) * extent_bytes() : 0;
}

Status KeySketch::write(const std::function<Status(const void*, std::size_t)>& write) const {
  if (!built()) return {};
  Array<std::byte> head(head_bytes());
  auto* floats =
      std::copy_n(bases_->floats.get(), bases_->size, reinterpret_cast<float*>(head.data()));
  const uint32_t counts[] = {built_pages_, pages_};
  std::memcpy(floats, counts, sizeof counts);
  RETURN_IF_ERROR(write(head.data(), head.size()));
  Array<int8_t> last;
  // A failed step may have made room for more.
  for (std::size_t e = 0; e < ceil_div(pages_, extent_pages); ++e) {
    for (uint32_t at = 0; at < shape_.heads_total(); ++at)
      if (!intact(at / shape_.kv_heads, at % shape_.kv_heads, static_cast<uint32_t>(e)))
        return damaged();
    const bool whole = (e + 1) * extent_pages <= pages_;
    if (!whole) {  // after a rewind it still has the rewound pages
      last.assign(extents_[e].data, extents_[e].data + extent_bytes());
      for (uint32_t p = pages_ % extent_pages; p < extent_pages; ++p)
        clear_page(shape_, p, last.data());
    }
    RETURN_IF_ERROR(write(whole ? extents_[e].data : last.data(), extent_bytes()));
  }
  return {};
}

const char* KeySketch::wrong(uint32_t pages) const {
  if (!built()) return nullptr;
  if (const char* reason = wrong_sketch(built_pages_, pages_, pages)) return reason;
  return wrong_floats({bases_->floats.get(), bases_->size});
}

Status KeySketch::map(const StoreShape& shape, std::shared_ptr<const CacheFile> file,
                      uint32_t pages, ThreadPool* pool, const Cancel* cancel, KeySketch* out) {
  KeySketch sketch(shape);
  const CacheFile::Section* section = file->find(SectionKind::sketch);
  if (!section || section->bytes == 0) return {};
  const auto corrupt = [&](const char* reason) {
    return Status::error(Code::corrupt, "%s: section 'sketch' %s; nothing was loaded",
                         file->path().c_str(), reason);
  };
  const uint64_t head = sketch.head_bytes(), extents = ceil_div(pages, extent_pages);
  if (pages == 0 || section->bytes != head + extents * sketch.extent_bytes())
    return corrupt("does not have the size of the pages' sketch");
  const uint64_t bytes = sketch.basis_bytes();
  auto bases = std::make_shared<Bases>(static_cast<std::size_t>(bytes / sizeof(float)));
  os::prefer_huge_pages(bases->floats.get(), static_cast<std::size_t>(bytes));
  RETURN_IF_ERROR(copy_floats(*file, *section, 0, 1, bases->size, pool, cancel,
                              [&](uint64_t) { return bases->floats.get(); }));
  uint32_t counts[2];
  RETURN_IF_ERROR(file->copy(*section, bytes, sizeof counts, reinterpret_cast<std::byte*>(counts)));
  if (const char* reason = wrong_sketch(counts[0], counts[1], pages)) return corrupt(reason);
  sketch.bases_ = std::move(bases);
  sketch.basis_stamp_ = new_stamp();
  sketch.built_pages_ = counts[0];
  sketch.pages_ = pages;
  const auto* data =
      reinterpret_cast<const int8_t*>(file->bytes(SectionKind::sketch).data() + head);
  for (uint64_t e = 0; e < extents; ++e)
    sketch.extents_.push_back({data + e * sketch.extent_bytes(), nullptr, new_stamp()});
  sketch.file_ = std::move(file);
  sketch.extents_at_ = head;
  *out = std::move(sketch);
  return {};
}

}  // namespace kvasir
