#include "store/key_sketch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/checked.h"
#include "base/stamp.h"

namespace kvasir {

using format::SectionKind;

namespace {

constexpr uint32_t iterations = 24;          // of the subspace: the leading directions need not be exact, only their span nearly
constexpr uint32_t sampled_tokens = 4096;     // of a head, for the second moment of its keys
constexpr uint64_t section_page = 4096;
constexpr double known_queries = 0.5;         // their share in the second moment of queries
constexpr double scaled_by = 0.375;            // power of a coordinate's variance: of 1/4, 3/8 and 1/2, which makes keys vary alike in all, it left the least error
constexpr double least_variance = 1e-6;       // of a coordinate, of the largest one's: what is smaller is not made larger

using Square = std::vector<double>;  // [n][n]

// The sum of a[i] b[i] in as many parts as vectors have room for.
double dot(const double* a, const double* b, uint32_t n) {
  constexpr uint32_t parts = 8;  // n is a multiple of it: PageShape::dim
  double sums[parts] = {};
  for (uint32_t i = 0; i < n; i += parts)
    for (uint32_t p = 0; p < parts; ++p) sums[p] += a[i + p] * b[i + p];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Makes the m rows of u [m][n] orthonormal, in order.
void orthonormalise(std::vector<double>& u, uint32_t n, uint32_t m) {
  for (uint32_t j = 0; j < m; ++j) {
    double* row = u.data() + std::size_t{j} * n;
    for (uint32_t pass = 0; pass < 2; ++pass)
      for (uint32_t k = 0; k < j; ++k) {
        const double* other = u.data() + std::size_t{k} * n;
        const double share = dot(row, other, n);
        for (uint32_t i = 0; i < n; ++i) row[i] -= share * other[i];
      }
    const double norm = std::sqrt(dot(row, row, n));
    for (uint32_t i = 0; i < n; ++i) row[i] = norm > 1e-200 ? row[i] / norm : 0;
  }
}

// to[j] = a u[j] for rows of u [m][n]; a is symmetric.
void multiply_rows(const Square& a, const std::vector<double>& u, uint32_t n, uint32_t m, std::vector<double>& to) {
  constexpr uint32_t part = 8;  // of a row, in registers; of all rows of a side by side: columns a power of two apart would share a few lines of the cache
  double panel[max_head_dim * part];
  for (uint32_t i = 0; i < n; i += part) {
    for (uint32_t k = 0; k < n; ++k) std::copy_n(a.data() + std::size_t{k} * n + i, part, panel + k * part);
    for (uint32_t j = 0; j < m; ++j) {
      const double* row = u.data() + std::size_t{j} * n;
      double sums[part] = {};
      for (uint32_t k = 0; k < n; ++k)
        for (uint32_t p = 0; p < part; ++p) sums[p] += row[k] * panel[k * part + p];
      std::copy_n(sums, part, to.data() + std::size_t{j} * n + i);
    }
  }
}

// The m leading eigenvectors of a (symmetric, positive semidefinite), as columns of [n][m], by orthogonal iteration.
std::vector<double> leading_directions(const Square& a, uint32_t n, uint32_t m) {
  std::vector<double> u(std::size_t{n} * m), next(u.size());  // [m][n]
  for (uint32_t i = 0; i < n; ++i)  // a start that no eigenvector is orthogonal to, for any but contrived input
    for (uint32_t j = 0; j < m; ++j) u[j * n + i] = std::cos(1.0 + 0.7 * i * (j + 1));
  orthonormalise(u, n, m);
  for (uint32_t step = 0; step < iterations; ++step) {
    multiply_rows(a, u, n, m, next);
    u.swap(next);
    if (step % 2) orthonormalise(u, n, m);  // the span is the same without
  }
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t j = 0; j < m; ++j) next[i * m + j] = u[j * n + i];
  return next;
}

// keys [dim][dim] += the upper part of k k^T of some tokens [tokens][dim], a multiple of four, few enough for sums in float: keys have 8 bits.
void add_moment(const float* k, uint32_t tokens, uint32_t dim, Square* keys) {
  for (uint32_t i = 0; i < dim; ++i) {
    float sums[max_head_dim] = {};
    const uint32_t first = i / 8 * 8;
    for (uint32_t t = 0; t < tokens; t += 4) {
      const float *a = k + t * dim, *b = a + dim, *c = b + dim, *d = c + dim;
      const float ai = a[i], bi = b[i], ci = c[i], di = d[i];
      for (uint32_t j = first; j < dim; ++j) sums[j] += (ai * a[j] + bi * b[j]) + (ci * c[j] + di * d[j]);
    }
    double* to = keys->data() + std::size_t{i} * dim;
    for (uint32_t j = first; j < dim; ++j) to[j] += static_cast<double>(sums[j]);
  }
}

// A and B of one head, [n][m], from the second moments of its keys and its queries; see the top of key_sketch.h. Makes L of the queries'.
void find_bases(const Square& keys, Square* queries, uint32_t n, uint32_t m, float* key_basis, float* query_basis) {
  Square& l = *queries;
  double trace = 0;
  for (uint32_t i = 0; i < n; ++i) trace += l[i * n + i];
  const double known = trace > 0 ? known_queries : 0;
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t j = 0; j < n; ++j) l[i * n + j] = (known > 0 ? known * l[i * n + j] * n / trace : 0) + (i == j ? 1 - known : 0);
  for (uint32_t j = 0; j < n; ++j) {  // Cholesky, in place, the upper part zeroed
    for (uint32_t i = 0; i < j; ++i) l[i * n + j] = 0;
    for (uint32_t i = j; i < n; ++i) {
      double sum = l[i * n + j];
      for (uint32_t k = 0; k < j; ++k) sum -= l[i * n + k] * l[j * n + k];
      l[i * n + j] = i == j ? std::sqrt(sum) : sum / l[j * n + j];
    }
  }
  Square kl(std::size_t{n} * n), moment(kl.size());  // K L; L^T K L
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t k = 0; k < n; ++k)
      for (uint32_t j = 0; j <= k; ++j) kl[i * n + j] += keys[i * n + k] * l[k * n + j];
  for (uint32_t k = 0; k < n; ++k)
    for (uint32_t i = 0; i <= k; ++i)
      for (uint32_t j = 0; j < n; ++j) moment[i * n + j] += l[k * n + i] * kl[k * n + j];
  std::vector<double> w = leading_directions(moment, n, m);
  std::vector<double> variance(m), column(n);
  for (uint32_t i = 0; i < n; ++i) {
    std::vector<double>& product = column;  // of row i and all of w
    std::fill_n(product.begin(), m, 0.0);
    for (uint32_t k = 0; k < n; ++k)
      for (uint32_t j = 0; j < m; ++j) product[j] += moment[i * n + k] * w[k * m + j];
    for (uint32_t j = 0; j < m; ++j) variance[j] += w[i * m + j] * product[j];
  }
  const double largest = *std::max_element(variance.begin(), variance.end());
  for (uint32_t j = 0; j < m; ++j) {
    const double scale = largest > 0 ? std::pow(std::max(variance[j] / largest, least_variance), scaled_by) : 1;
    for (uint32_t i = 0; i < n; ++i) {
      double sum = 0;
      for (uint32_t k = 0; k <= i; ++k) sum += l[i * n + k] * w[k * m + j];
      key_basis[i * m + j] = static_cast<float>(sum / scale);
    }
    for (uint32_t i = n; i-- > 0;) {
      double sum = w[i * m + j];
      for (uint32_t k = i + 1; k < n; ++k) sum -= l[k * n + i] * column[k];
      column[i] = sum / l[i * n + i];
      query_basis[i * m + j] = static_cast<float>(column[i] * scale);
    }
  }
}

// Zeroes what page p of an extent takes, of all heads; the layout is page.h's.
void clear_page(const StoreShape& shape, uint32_t p, int8_t* extent) {
  const PageShape& page = shape.page;
  const std::size_t lines = std::size_t{quad_tokens} * page.sketch_dim() / 8, tile_bytes = lines * tile_blocks * 4;
  for (uint32_t at = 0; at < shape.heads_total(); ++at, extent += page.sketch_bytes())
    for (uint32_t i = p * page.page_quads(); i < (p + 1) * page.page_quads(); ++i) {
      int8_t* quad = extent + i / tile_blocks * tile_bytes + i % tile_blocks * 4;
      for (std::size_t line = 0; line < lines; ++line) std::memset(quad + line * tile_blocks * 4, 0, 4);
      std::memset(extent + page.quad_tiles() * tile_bytes + i * sizeof(uint16_t), 0, sizeof(uint16_t));
    }
}

}  // namespace

KeySketch::Extent KeySketch::new_extent() const {
  auto* memory = static_cast<int8_t*>(allocate_zeroed(extent_bytes()));
  if (!memory) throw std::bad_alloc();
  std::shared_ptr<int8_t> owner(memory, [](int8_t* p) { deallocate(p); });
  return {memory, std::move(owner), new_stamp()};
}

void KeySketch::seal(Extent* extent, const PageStore& pages, const Bases& bases, uint32_t at, uint32_t page, const Kernels& kernels) const {
  const PageRef ref = pages.page(at / shape_.kv_heads, at % shape_.kv_heads, page);
  kernels.seal_sketch(shape_.page, bases.data() + at * basis_floats(), ref.data, ref.scales, page % extent_pages,
                      extent->memory.get() + at * shape_.page.sketch_bytes());
}

Status KeySketch::build(const PageStore& pages, const QueryMoment& queries, const Kernels& kernels, ThreadPool* pool) {
  const uint32_t dim = shape_.page.dim, n = shape_.page.sketch_dim(), heads = shape_.heads_total(), count = pages.pages();
  if (count == 0) return {};
  auto bases = std::make_shared<Bases>(2 * heads * basis_floats());
  std::vector<Extent> extents;
  extents.reserve(pages.extents());
  while (extents.size() < pages.extents()) extents.push_back(new_extent());

  const uint32_t page_tokens = shape_.page.page_tokens;
  const auto stride = static_cast<uint32_t>(ceil_div(count, std::max(1u, sampled_tokens / page_tokens)));
  std::vector<Array<float>> rows(pool->threads());
  std::vector<Square> moments(pool->threads()), asked(pool->threads());
  for (uint32_t t = 0; t < pool->threads(); ++t) {
    rows[t].resize(std::size_t{2} * page_tokens * dim);
    moments[t].resize(std::size_t{dim} * dim);
    asked[t].resize(std::size_t{dim} * dim);
  }
  std::atomic<bool> intact{true};
  pool->run(heads, [&](uint32_t at, uint32_t worker) {
    const uint32_t layer = at / shape_.kv_heads, head = at % shape_.kv_heads;
    Square& keys = moments[worker];
    std::fill(keys.begin(), keys.end(), 0.0);
    float* k = rows[worker].data();
    for (uint32_t p = 0; p < count; ++p) {
      if (!pages.intact_page(layer, head, p)) {
        intact = false;
        return;
      }
      // The sinks' keys are outliers that no selector is asked about.
      if (p % stride != stride - 1 || (p == 0 && count > 1)) continue;
      const PageRef ref = pages.page(layer, head, p);
      kernels.unseal_page(shape_.page, ref.data, ref.scales, k, k + std::size_t{page_tokens} * dim);
      add_moment(k, page_tokens, dim, &keys);
    }
    for (uint32_t i = 0; i < dim; ++i)
      for (uint32_t j = 0; j < i; ++j) keys[i * dim + j] = keys[j * dim + i];
    std::fill(asked[worker].begin(), asked[worker].end(), 0.0);
    if (queries) queries(layer, head, asked[worker].data());
    find_bases(keys, &asked[worker], dim, n, bases->data() + at * basis_floats(), bases->data() + (heads + at) * basis_floats());
    for (uint32_t p = 0; p < count; ++p) seal(&extents[p / extent_pages], pages, *bases, at, p, kernels);
  });
  if (!intact) return pages.damaged();
  bases_ = std::move(bases);
  basis_stamp_ = new_stamp();
  extents_ = std::move(extents);
  file_.reset();
  pages_ = built_pages_ = count;
  return {};
}

Status KeySketch::reserve(uint32_t pages) {
  if (!built() || pages <= pages_) return {};
  const uint32_t last = pages_ / extent_pages;  // the extent that the next page goes to
  extents_.resize(std::min<std::size_t>(extents_.size(), last + 1));
  if (last < extents_.size() && extents_[last].memory.use_count() != 1) {
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
    for (uint32_t p = pages_; p < pages.pages(); ++p) seal(&extents_[p / extent_pages], pages, *bases_, at, p, kernels);
  });
  for (uint32_t e = pages_ / extent_pages; e < pages.extents(); ++e) extents_[e].stamp = new_stamp();
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
  return extents_[e].data + (std::size_t{layer} * shape_.kv_heads + head) * shape_.page.sketch_bytes();
}

const float* KeySketch::query_basis(uint32_t layer, uint32_t head) const {
  return bases_->data() + (shape_.heads_total() + std::size_t{layer} * shape_.kv_heads + head) * basis_floats();
}

bool KeySketch::intact(uint32_t layer, uint32_t head, uint32_t e) const {
  if (extents_[e].memory) return true;
  const uint64_t at = extents_at_ + uint64_t{e} * extent_bytes() +
                      (uint64_t{layer} * shape_.kv_heads + head) * shape_.page.sketch_bytes();
  return file_->check(*file_->find(SectionKind::sketch), at, shape_.page.sketch_bytes());
}

Status KeySketch::copy(uint32_t e, uint32_t first, uint32_t heads, std::byte* to) const {
  const std::size_t at = first * shape_.page.sketch_bytes(), size = heads * shape_.page.sketch_bytes();
  if (!extents_[e].memory) return file_->copy(*file_->find(SectionKind::sketch), extents_at_ + uint64_t{e} * extent_bytes() + at, size, to);
  std::memcpy(to, extents_[e].data + at, size);
  return {};
}

Status KeySketch::damaged() const {
  if (file_)
    if (Status s = file_->failure(); !s.ok()) return s;
  return Status::error(Code::internal, "a sketch was reported as damaged and is not");
}

uint64_t KeySketch::private_bytes() const {
  uint64_t bytes = bases_ ? bases_->size() * sizeof(float) : 0;
  for (const Extent& e : extents_) bytes += e.memory ? extent_bytes() : 0;
  return bytes;
}

uint64_t KeySketch::head_bytes() const { return round_up(basis_bytes() + 2 * sizeof(uint32_t), section_page); }

uint64_t KeySketch::file_bytes() const { return built() ? head_bytes() + ceil_div(pages_, extent_pages) * extent_bytes() : 0; }

Status KeySketch::write(const std::function<Status(const void*, std::size_t)>& write) const {
  if (!built()) return {};
  Array<std::byte> head(head_bytes());
  auto* floats = std::copy(bases_->begin(), bases_->end(), reinterpret_cast<float*>(head.data()));
  const uint32_t counts[] = {built_pages_, pages_};
  std::memcpy(floats, counts, sizeof counts);
  if (Status s = write(head.data(), head.size()); !s.ok()) return s;
  Array<int8_t> last;
  for (std::size_t e = 0; e < ceil_div(pages_, extent_pages); ++e) {  // a step that came to nothing may have made room for more
    for (uint32_t at = 0; at < shape_.heads_total(); ++at)
      if (!intact(at / shape_.kv_heads, at % shape_.kv_heads, static_cast<uint32_t>(e))) return damaged();
    const bool whole = (e + 1) * extent_pages <= pages_;
    if (!whole) {  // after a step back it still holds what was taken back
      last.assign(extents_[e].data, extents_[e].data + extent_bytes());
      for (uint32_t p = pages_ % extent_pages; p < extent_pages; ++p) clear_page(shape_, p, last.data());
    }
    if (Status s = write(whole ? extents_[e].data : last.data(), extent_bytes()); !s.ok()) return s;
  }
  return {};
}

Status KeySketch::map(const StoreShape& shape, std::shared_ptr<const CacheFile> file, uint32_t pages, KeySketch* out) {
  KeySketch sketch(shape);
  const CacheFile::Section* section = file->find(SectionKind::sketch);
  if (!section || section->bytes == 0) return {};
  const auto corrupt = [&](const char* what) {
    return Status::error(Code::corrupt, "%s: section 'sketch' %s; nothing was loaded", file->path().c_str(), what);
  };
  const uint64_t head = sketch.head_bytes(), extents = ceil_div(pages, extent_pages);
  if (pages == 0 || section->bytes != head + extents * sketch.extent_bytes()) return corrupt("does not have the size of the pages' sketch");
  if (!file->check(*section, 0, head)) return file->failure();
  const std::byte* at = file->bytes(SectionKind::sketch).data();
  const auto* floats = reinterpret_cast<const float*>(at);
  const std::size_t size = sketch.basis_bytes() / sizeof(float);
  if (!std::all_of(floats, floats + size, [](float x) { return std::isfinite(x); })) return corrupt("holds a number that is not finite");
  auto bases = std::make_shared<Bases>(floats, floats + size);
  uint32_t counts[2];
  std::memcpy(counts, floats + size, sizeof counts);
  if (counts[1] != pages || counts[0] == 0 || counts[0] > pages) return corrupt("is of another number of pages");
  sketch.bases_ = std::move(bases);
  sketch.basis_stamp_ = new_stamp();
  sketch.built_pages_ = counts[0];
  sketch.pages_ = pages;
  const auto* data = reinterpret_cast<const int8_t*>(at + head);
  for (uint64_t e = 0; e < extents; ++e) sketch.extents_.push_back({data + e * sketch.extent_bytes(), nullptr, new_stamp()});
  sketch.file_ = std::move(file);
  sketch.extents_at_ = head;
  *out = std::move(sketch);
  return {};
}

}  // namespace kvasir
