#include "attention/compare.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "attention/worker.h"

namespace kvasir {

Compared& Compared::operator+=(const Compared& o) {
  queries += o.queries;
  mass += o.mass;
  min_mass = std::min(min_mass, o.min_mass);
  error += o.error;
  largest_error = std::max(largest_error, o.largest_error);
  recall += o.recall;
  min_recall = std::min(min_recall, o.min_recall);
  tokens += o.tokens;
  searches += o.searches;
  search_keys += o.search_keys;
  search_recall += o.search_recall;
  estimates += o.estimates;
  mass_estimated += o.mass_estimated;
  estimate_error += o.estimate_error;
  certified += o.certified;
  certificate += o.certificate;
  certificate_excess = std::max(certificate_excess, o.certificate_excess);
  return *this;
}

void Comparison::Scratch::keep_near(const AttentionState& state, uint32_t rows, uint32_t dim) {
  const std::size_t o = std::size_t{rows} * dim;
  near.resize(o + 2 * rows);
  std::copy_n(state.o, o, near.data());
  std::copy_n(state.m, rows, near.data() + o);
  std::copy_n(state.l, rows, near.data() + o + rows);
  estimated.clear(), certified.clear();
}

void Comparison::begin(CompareLevel level, const PageStore& pages, uint32_t first_page,
                       uint32_t tokens) {
  if (sums_.empty()) sums_.assign(std::size_t{layers_} * kv_heads_, {});
  step_.assign(std::size_t{tokens} * kv_heads_, {});
  tokens_ = tokens;
  n_ = (pages.pages() - std::min(pages.pages(), first_page)) * pages.shape().page.page_tokens;
  layers_too_ = level == CompareLevel::layers && n_ > 0;
  if (!layers_too_) return;
  set_size_ = static_cast<uint32_t>(std::ceil(similar_set_share * n_));
  best_.assign(std::size_t{kv_heads_} * n_, 0.0f);
  shares_.assign(best_.size(), 0.0f);
  near_heads_.assign(kv_heads_, 0.0);
  means_.resize(std::size_t{layers_} * n_);
  near_.resize(layers_);
  sets_.resize(std::size_t{layers_} * set_size_);
  bytes_.resize(std::size_t{n_} * 4);
  covered_.resize(std::size_t{layers_} * layers_);
}

namespace {

// Computes all scores after the sinks, [rows][n], and the exact output, [rows][head_dim]. Returns
// false if a page of a mapped file is damaged.
bool attend_exactly(const Comparison::Case& one, uint32_t n, Comparison::Scratch* s) {
  const PageShape& shape = one.pages.shape().page;
  const uint32_t rows = one.rows.rows, pages = one.pages.pages();
  s->scores.resize(std::size_t{rows} * n);
  s->exact.resize(std::size_t{rows} * shape.head_dim);
  s->bytes.resize(
      std::max<std::size_t>(one.kernels.attend_scratch(rows, shape.dim), std::size_t{n} * 4));
  const AttentionState state{s->near.data(), s->near.data() + std::size_t{rows} * shape.dim,
                             s->near.data() + std::size_t{rows} * (shape.dim + 1)};
  PageRef refs[extent_pages];
  for (uint32_t p = one.first_page; p < pages; p += extent_pages) {
    if (one.cancelled()) return true;
    const uint32_t some = std::min(extent_pages, pages - p);
    for (uint32_t i = 0; i < some; ++i) {
      if (!one.pages.intact_page(one.layer, one.kv_head, p + i)) return false;
      refs[i] = one.pages.page(one.layer, one.kv_head, p + i);
    }
    one.kernels.score_tokens(one.rows, refs, some,
                             s->scores.data() + (p - one.first_page) * shape.page_tokens, n,
                             s->bytes.data());
    one.kernels.attend_pages(one.rows, refs, some, state, s->bytes.data());
  }
  one.kernels.finish(state, rows, shape.dim, shape.head_dim, s->exact.data(), shape.head_dim);
  add_value_centre(one.value_centre, state.l, rows, shape.head_dim, s->exact.data());
  return true;
}

// Marks the tokens after the sinks that a row has read: 1, samples 2. Returns their number.
uint32_t mark_read(const Comparison::Case& one, uint32_t row, uint32_t n, Array<uint8_t>* read) {
  read->assign(n, one.chosen ? 0 : 1);
  if (!one.chosen) return n;
  const std::size_t list = one.chosen->lists.size() == 1 ? 0 : row;
  const uint32_t page_tokens = one.pages.shape().page.page_tokens;
  uint32_t count = 0;
  const auto mark = [&](const Array<PageRef>& pages, const Array<uint32_t>& numbers, uint8_t as) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const uint32_t at = (numbers[i] - one.first_page) * page_tokens;
      for (uint64_t left = pages[i].tokens; left; left &= left - 1, ++count)
        (*read)[at + static_cast<uint32_t>(std::countr_zero(left))] = as;
    }
  };
  mark(one.chosen->lists[list], one.chosen->page_numbers[list], 1);
  if (one.chosen->sampled) mark(one.chosen->samples[list], one.chosen->sample_numbers[list], 2);
  return count;
}

// Marks instead the tokens that the row's own search has scanned.
void mark_found(const Comparison::Case& one, uint32_t row, uint32_t n, Array<uint8_t>* read) {
  read->assign(n, 0);
  for (const uint32_t token : one.chosen->found[row])
    (*read)[token - one.first_page * one.pages.shape().page.page_tokens] = 1;
}

double output_error(const float* out, const float* exact, uint32_t n) {
  double difference = 0, norm = 0;
  for (uint32_t d = 0; d < n; ++d) {
    const double e = static_cast<double>(exact[d]), by = static_cast<double>(out[d]) - e;
    difference += by * by;
    norm += e * e;
  }
  return norm > 0 ? std::sqrt(difference / norm) : 0;
}

}  // namespace

Comparison::RowSums Comparison::sum_row(const Scratch& s, uint32_t row, double near_m,
                                        double near_l) const {
  const float* scores = s.scores.data() + std::size_t{row} * n_;
  RowSums sums{std::max(near_m, static_cast<double>(*std::max_element(scores, scores + n_)))};
  sums.near = near_l * std::exp(near_m - sums.largest);
  sums.total = sums.read = sums.certain = sums.near;
  for (uint32_t t = 0; t < n_; ++t) {
    const double weight = std::exp(static_cast<double>(scores[t]) - sums.largest);
    sums.total += weight;
    if (s.read[t]) sums.read += weight;
    if (s.read[t] == 1) sums.certain += weight;
  }
  return sums;
}

Compared Comparison::compare_row(const Case& one, uint32_t row, const RowSums& sums,
                                 Scratch* s) const {
  const uint32_t head_dim = one.pages.shape().page.head_dim;
  const std::size_t out_at = std::size_t{row} * head_dim;
  s->best.resize(std::min(compared_best, n_));
  const uint32_t best =
      one.kernels.top_k(s->scores.data() + std::size_t{row} * n_, n_,
                        static_cast<uint32_t>(s->best.size()), s->best.data(), s->bytes.data());
  const auto share_of_best = [&] {
    const auto found = std::count_if(s->best.begin(), s->best.begin() + best,
                                     [&](uint32_t t) { return s->read[t] != 0; });
    return static_cast<double>(found) / std::max(best, 1u);
  };
  Compared c;
  c.queries = 1;
  c.mass = c.min_mass = sums.read / sums.total;
  c.error = c.largest_error = output_error(one.out + out_at, s->exact.data() + out_at, head_dim);
  c.recall = c.min_recall = share_of_best();
  if (!s->estimated.empty()) {
    c.estimates = 1;
    c.mass_estimated = s->estimated[row];
    c.estimate_error = std::fabs(s->estimated[row] - sums.certain / sums.total);
  }
  if (!s->certified.empty()) {
    c.certified = 1;
    c.certificate = s->certified[row];
    c.certificate_excess = c.certificate - sums.certain / sums.total;
  }
  if (one.chosen && row < one.chosen->found.size() && !one.chosen->found[row].empty()) {
    c.searches = 1;
    c.search_keys = static_cast<double>(one.chosen->found[row].size());
    mark_found(one, row, n_, &s->read);
    c.search_recall = share_of_best();
  }
  return c;
}

bool Comparison::compare(const Case& one, Scratch* s) {
  if (n_ == 0) return true;
  const uint32_t rows = one.rows.rows, dim = one.rows.dim;
  // copied before attend_exactly() adds the pages to the state
  const Array<float> near_ml(s->near.data() + std::size_t{rows} * dim,
                             s->near.data() + s->near.size());
  if (!attend_exactly(one, n_, s)) return false;
  for (uint32_t r = 0; r < rows && !one.cancelled(); ++r) {
    const uint32_t count = mark_read(one, r, n_, &s->read);
    const RowSums sums =
        sum_row(*s, r, static_cast<double>(near_ml[r]), static_cast<double>(near_ml[rows + r]));
    Compared c = compare_row(one, r, sums, s);
    c.tokens = count;
    step_[std::size_t{one.token} * kv_heads_ + one.kv_head] += c;
    if (layers_too_ && one.token + 1 == tokens_) keep_shares(one, *s, r, sums);
  }
  return true;
}

void Comparison::keep_shares(const Case& one, const Scratch& s, uint32_t row, const RowSums& sums) {
  const float* scores = s.scores.data() + std::size_t{row} * n_;
  float* best = best_.data() + std::size_t{one.kv_head} * n_;
  float* sum = shares_.data() + std::size_t{one.kv_head} * n_;
  for (uint32_t t = 0; t < n_; ++t) {
    const auto share =
        static_cast<float>(std::exp(static_cast<double>(scores[t]) - sums.largest) / sums.total);
    best[t] = std::max(best[t], share);
    sum[t] += share;
  }
  near_heads_[one.kv_head] += sums.near / sums.total;
  if (one.kv_head == 0 && row == 0) group_ = one.rows.rows;
}

void Comparison::end(const Kernels& kernels, uint32_t layer) {
  for (std::size_t i = 0; i < step_.size(); ++i)
    sums_[layer * kv_heads_ + i % kv_heads_] += step_[i];
  if (!layers_too_) return;
  end_layer_set(kernels, layer);
  if (layer + 1 == layers_) add_covered();
}

void Comparison::end_layer_set(const Kernels& kernels, uint32_t layer) {
  const double heads = static_cast<double>(kv_heads_ * group_);
  float* means = means_.data() + std::size_t{layer} * n_;
  near_[layer] = 0;
  for (uint32_t h = 0; h < kv_heads_; ++h) near_[layer] += near_heads_[h] / heads;
  for (uint32_t t = 0; t < n_; ++t) {
    double sum = 0;
    for (std::size_t h = 0; h < kv_heads_; ++h) {
      sum += static_cast<double>(shares_[h * n_ + t]);
      best_[t] = std::max(best_[t], best_[h * n_ + t]);
    }
    means[t] = static_cast<float>(sum / heads);
  }
  uint32_t* set = sets_.data() + std::size_t{layer} * set_size_;
  std::fill(set + kernels.top_k(best_.data(), n_, set_size_, set, bytes_.data()), set + set_size_,
            UINT32_MAX);
}

void Comparison::add_covered() {
  for (std::size_t i = 0; i < layers_; ++i)
    for (std::size_t j = 0; j < layers_; ++j) {
      double mass = near_[j];
      for (uint32_t k = 0; k < set_size_; ++k)
        if (const uint32_t t = sets_[i * set_size_ + k]; t != UINT32_MAX)
          mass += static_cast<double>(means_[j * n_ + t]);
      covered_[i * layers_ + j] += mass;
    }
  ++covered_steps_;
}

void Comparison::reset() {
  std::fill(sums_.begin(), sums_.end(), Compared());
  std::fill(covered_.begin(), covered_.end(), 0.0);
  covered_steps_ = 0;
}

}  // namespace kvasir
