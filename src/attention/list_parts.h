// Parts of a selection's list, which tasks attend in parallel. Borders are page numbers, so a page
// and its samples are in one part. They depend on the selection alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "select/blocks.h"

namespace kvasir {

constexpr uint32_t part_entries = 64;  // pages or samples of a part, about

// The pages of a list with numbers from `begin` to before `end`.
struct ListPart {
  uint32_t list, begin, end;
};

// Calls add(ListPart) for each part of a list. An empty list has none.
template <typename Add>
void for_each_part(const Selection& choice, uint32_t list, Add&& add) {
  const Array<uint32_t>& pages = choice.page_numbers[list];
  const bool by_samples = choice.sampled && choice.sample_numbers[list].size() > pages.size();
  const Array<uint32_t>& numbers = by_samples ? choice.sample_numbers[list] : pages;
  const auto parts = static_cast<uint32_t>(ceil_div(numbers.size(), part_entries));
  for (uint32_t p = 0; p < parts; ++p)
    add(ListPart{list, p == 0 ? 0 : numbers[numbers.size() * p / parts],
                 p + 1 == parts ? UINT32_MAX : numbers[numbers.size() * (p + 1) / parts]});
}

// Copies a part of a selection to `out`, which then has one list.
inline void copy_part(const Selection& choice, const ListPart& part, Selection* out) {
  const auto copy = [&](const Array<PageRef>& from, const Array<uint32_t>& from_numbers,
                        Array<PageRef>* to, Array<uint32_t>* to_numbers) {
    const auto begin = std::lower_bound(from_numbers.begin(), from_numbers.end(), part.begin),
               end = std::lower_bound(begin, from_numbers.end(), part.end);
    to_numbers->assign(begin, end);
    to->assign(from.begin() + (begin - from_numbers.begin()),
               from.begin() + (end - from_numbers.begin()));
  };
  begin_selection(1, out);
  copy(choice.lists[part.list], choice.page_numbers[part.list], &out->lists[0],
       &out->page_numbers[0]);
  if (!choice.sampled) return;
  out->samples.resize(1), out->sample_numbers.resize(1);
  out->sampled = true;
  copy(choice.samples[part.list], choice.sample_numbers[part.list], &out->samples[0],
       &out->sample_numbers[0]);
}

}  // namespace kvasir
