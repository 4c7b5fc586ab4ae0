// Helpers for strategies that select single tokens by their exact scores.
#pragma once

#include "select/selector.h"

namespace kvasir {

// Writes the exact score of every sealed token from first_page on to scratch->scores: [rows][pages
// * page_tokens]; those of earlier pages are unchanged.
Scanned score_all_tokens(const SelectorQuery& query, SelectorScratch* scratch);

}  // namespace kvasir
