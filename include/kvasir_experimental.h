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
 *   "infllm"  blocks selected by their representatives (InfLLM). Default budget: 0.05, at least
 *             1024 tokens. With a kv_cache, each kv_cache_update needs q. kv_session_prepare
 *             prefills the whole text again if an older library saved it without representatives
 *   "snapkv"  selects once, after a prefill, by the last queries (SnapKV). Default budget: as
 *             "infllm". Questions are prefilled exactly
 */
#ifndef KVASIR_EXPERIMENTAL_H
#define KVASIR_EXPERIMENTAL_H

#include "kvasir.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Parameters of kv_strategy_set and kv_strategy_get besides those of kv_param. */
enum {
  KV_PARAM_SEARCH_BREADTH = 1000,  /* "hnsw", "ood", "dipr-graph": candidates of a search, at least
                                    * 64; "ivf": clusters to read. Default: as the budget needs;
                                    * "ood": an eighth of the budget, at least 128 */
  KV_PARAM_HEAD_GRAPHS = 1001,     /* "ood", "dipr-graph". 0 (default): one graph per group of query
                                    * heads, built from all their queries; 1: one graph per query
                                    * head, each as large and as slow to build */
  KV_PARAM_BUDGET_SCHEDULE = 1002, /* a kv_budget_schedule; for strategies with a budget per layer:
                                    * not "auto", "bounded", "filter-layers" */
  KV_PARAM_FILTER_WINDOW = 1003    /* "filter-layers": a kv_filter_window */
};

/* Distribution of a budget over the selecting layers. The mean stays the same. */
typedef enum kv_budget_schedule {
  KV_BUDGET_UNIFORM = 0, /* the same in all (default) */
  KV_BUDGET_LINEAR = 1,  /* linear, from 3/2 of the mean in the first layer to 1/2 in the last */
  KV_BUDGET_PYRAMID = 2  /* linear, from 39/20 to 1/20 (PyramidKV) */
} kv_budget_schedule;

/* Queries by whose attention a filter layer selects. */
typedef enum kv_filter_window {
  KV_FILTER_LAST = 0,        /* the newest (default) */
  KV_FILTER_EXPONENTIAL = 1, /* the newest 16, each with twice the weight of the one before it */
  KV_FILTER_UNIFORM = 2      /* the newest 16 with equal weights */
} kv_filter_window;

/* Flags of kv_session_measure. */
#define KV_MEASURE_COMPARE 1u /* also compute exact attention of each decoded token, and compare */
#define KV_MEASURE_LAYERS 2u  /* also compare the layers with each other; implies COMPARE */
#define KV_MEASURE_CERTIFY 4u /* compute a lower bound of the attention that was read */

/* Measures all later decode; flags 0 (default) stops it. Decode is slower: "bounded" then selects
 * for each token of a question, not once for all. The CPU attends all layers. A fork has the same
 * setting. kv_session_stats_json has the results of the last answer:
 *
 *   "compared"  COMPARE, at the cost of full attention. Per layer and KV head, means over query
 *               heads and tokens: "mass", the share of the exact attention that was read; "error",
 *               the relative error of the output; "recall", the part of the 100 largest scores
 *               that was read. With an index also "search_keys", the keys that a search for one
 *               query head alone would scan, and its "search_recall"
 *   "covered"   LAYERS, within "compared", for the newest token of each step. [i][j] is the share
 *               of layer j's attention in sinks, window and the 5% of tokens that layer i attends
 *               most
 *   "last_certificate", "last_least_certificate"
 *               CERTIFY, at the cost of a scan of Quest's upper bounds. Lower bounds of the share
 *               of exact attention that was read, valid for any keys: mean and minimum. Samples of
 *               "bounded" do not count as read. The bounds are loose for long documents
 *
 * KV_BAD_ARGUMENT (unknown flags), KV_NO_MEMORY, KV_BUSY. */
KV_API kv_status kv_session_measure(kv_session* session, uint32_t flags, kv_error* error);

/* Appends tokens as kv_prefill_tokens does. logits, float32 [count][vocabulary], receives the
 * logits at each token. After a failure the complete chunks stay, and kv_session_tokens has their
 * number. Only their logits are written. Progress and codes of kv_prefill_tokens. */
KV_API kv_status kv_prefill_logits(kv_session* session, const int32_t* tokens, size_t count,
                                   float* logits, const kv_control* control, kv_error* error);

/* kv_session_from_cache: do not compare keys. Keys and values may then be synthetic, for
 * measurement. Nothing distinguishes such a session, or its file, from one of a text. */
#define KV_CACHE_UNCHECKED 0x20u

#ifdef __cplusplus
}
#endif
#endif /* KVASIR_EXPERIMENTAL_H */
