/* Kvasir: functions and parameters for measurement and research.
 *
 * Nothing here is part of the ABI promise (docs/abi.md). Names, numbers and behaviour may change or
 * disappear in any version, without a new soname. A program that uses this header is built together
 * with its library. The rules of kvasir.h hold. Results are in the JSON of kv_session_stats_json.
 *
 * Experimental strategies: kv_strategy_create takes their names, kv_strategy_list marks them with
 * KV_STRATEGY_EXPERIMENTAL. They have DENSE_LAYERS, SHARE_HEADS and a budget.
 *
 *   "ivf"     clusters of keys. Default budget: 0.02, at least 512 tokens
 *   "infllm"  blocks by their representatives (InfLLM). Default: 0.05, at least 1024 tokens. With a
 *             kv_cache, each kv_cache_update needs q. kv_session_prepare prefills the whole text
 *             again where an older library saved it without representatives
 *   "snapkv"  chooses once, after a prefill, by the last queries (SnapKV). Default: as "infllm".
 *             Questions are prefilled exactly
 */
#ifndef KVASIR_EXPERIMENTAL_H
#define KVASIR_EXPERIMENTAL_H

#include "kvasir.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Parameters of kv_strategy_set and kv_strategy_get besides those of kv_param. */
enum {
  KV_PARAM_SEARCH_BREADTH = 1000,  /* "hnsw", "ood", "dipr-graph": tokens that a search keeps, at
                                    * least 64; "ivf": clusters that it reads. Default: as the
                                    * budget needs; "ood": an eighth of it, at least 128 */
  KV_PARAM_HEAD_GRAPHS = 1001,     /* "ood", "dipr-graph": 0 (default): the query heads of a group
                                    * share one graph, made from the queries of all; 1: each has its
                                    * own, of that size and build time each */
  KV_PARAM_BUDGET_SCHEDULE = 1002, /* a kv_budget_schedule; for strategies whose layers each have a
                                    * budget: not "auto", "bounded", "filter-layers" */
  KV_PARAM_FILTER_WINDOW = 1003    /* "filter-layers": a kv_filter_window */
};

/* How a budget is spread over the layers that select. The mean stays the same. */
typedef enum kv_budget_schedule {
  KV_BUDGET_UNIFORM = 0, /* the same in all (default) */
  KV_BUDGET_LINEAR = 1,  /* linear, from 3/2 of the mean in the first layer to 1/2 in the last */
  KV_BUDGET_PYRAMID = 2  /* linear, from 39/20 to 1/20 (PyramidKV) */
} kv_budget_schedule;

/* Queries whose attention a filter layer selects by. */
typedef enum kv_filter_window {
  KV_FILTER_LAST = 0,        /* the newest (default) */
  KV_FILTER_EXPONENTIAL = 1, /* the newest 16, each with twice the weight of the one before it */
  KV_FILTER_UNIFORM = 2      /* the newest 16 with equal weights */
} kv_filter_window;

/* What kv_session_measure measures. */
#define KV_MEASURE_COMPARE 1u /* attend each decoded token exactly too, and compare */
#define KV_MEASURE_LAYERS 2u  /* also compare the layers with each other; implies the first */
#define KV_MEASURE_CERTIFY 4u /* bound the attention that was read from below */

/* Measures all decode from now on; flags 0 (default) stops it. Each token of a question then
 * selects for itself, where "bounded" otherwise selects for all together: slower. A GPU leaves
 * attention to the CPU. A fork has the same setting. kv_session_stats_json has the results of the
 * last answer:
 *
 *   "compared"  COMPARE, at the cost of full attention. Per layer and KV head, means over query
 *               heads and tokens: "mass", the share of the exact attention that was read; "error",
 *               the relative error of the output; "recall", the share of the 100 largest scores
 *               that was read. With an index also "search_keys", what the search of one query head
 *               alone would scan, and its "search_recall"
 *   "covered"   LAYERS, within "compared", of the newest token of each step: [i][j] is the share of
 *               layer j's attention in sinks, window and the 5% of tokens that layer i attends most
 *   "last_certificate", "last_least_certificate"
 *               CERTIFY, at the cost of a scan of Quest's upper bounds: the mean and the least
 *               share of exact attention that was certainly read, whatever the keys are. Samples
 *               of "bounded" do not count as read. The bounds are loose for long documents
 *
 * KV_BAD_ARGUMENT (unknown flags), KV_NO_MEMORY, KV_BUSY. */
KV_API kv_status kv_session_measure(kv_session* session, uint32_t flags, kv_error* error);

/* Appends tokens as kv_prefill_tokens does. logits, float32 [count][vocabulary], receives the
 * logits at each token. After a failure whole chunks stay, as kv_session_tokens shows; the
 * logits of the others are not written. Progress and codes of kv_prefill_tokens. */
KV_API kv_status kv_prefill_logits(kv_session* session, const int32_t* tokens, size_t count,
                                   float* logits, const kv_control* control, kv_error* error);

/* kv_session_from_cache: do not compare keys. Keys and values may then be synthetic, to measure
 * with. Nothing distinguishes such a session, or its file, from one of a text. */
#define KV_CACHE_UNCHECKED 0x20u

#ifdef __cplusplus
}
#endif
#endif /* KVASIR_EXPERIMENTAL_H */
