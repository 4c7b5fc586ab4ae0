/* Kvasir: read a long document once, keep it, question it any number of times.
 *
 *     kv_model *m;    kv_open("model.gguf", NULL, &m, &err);
 *     kv_session *s;  kv_session_open(m, NULL, &s, &err);
 *     kv_prefill(s, text, size, NULL, NULL, &err);                  minutes, once
 *     kv_save(s, "book.kv", NULL, &err);                            atomic, checksummed
 *     kv_load(m, "book.kv", NULL, NULL, &s2, &err);                 milliseconds, mapped
 *     kv_generate(s2, question, n, NULL, on_text, user, NULL, &err);
 *
 * Rules for every function
 *  - Returns a kv_status; KV_OK is 0. On any other status outputs are unchanged (unless the entry says otherwise), and the handle is
 *    as it was before the call.
 *  - The last parameter is a kv_error, owned by the caller, which may be NULL and needs no freeing. It is written on failure only.
 *  - Nothing ends the process, throws, prints, installs a signal handler or needs a global initialisation. After the last handle
 *    is closed no thread and no memory of the library is left.
 *  - Text is pointer and size in bytes, UTF-8, and need not be terminated. A NULL pointer is allowed where the size is 0. Bytes
 *    that are not UTF-8 are accepted and tokenized as bytes. Paths are NUL-terminated UTF-8.
 *  - Option structs begin with struct_size. Fill them with their init function, whose size is sizeof the struct, then change what you
 *    like; NULL means all defaults. A struct of an older, shorter header is accepted (defaults for the rest); of a newer, longer one
 *    only if the extra bytes are zero (KV_BAD_ARGUMENT).
 *  - Callbacks run on the calling thread and never after the call returned. Return 0 to go on, anything else to stop
 *    (the call then returns KV_CANCELLED). A callback may not call the handle that is calling it: KV_BUSY.
 *  - A C++ exception from a callback does not leave the call. It counts as "stop": KV_CANCELLED, and the message names the callback
 *    and has the exception's text. What a log callback throws is dropped. A callback must not longjmp out of a call.
 *  - Cancelled threads (POSIX): pthread_cancel waits until the call has returned, or until a callback reaches a cancellation point.
 *    A thread may also end in a callback by pthread_exit. The handle can then be used by another thread, or closed. It holds what a
 *    call that was stopped there would leave.
 *  - Floating point: a call computes in its own environment, whatever rounding, traps or flush-to-zero the host has set. Results do
 *    not depend on the host's. Callbacks run in the host's environment, and it is as before after the call.
 *  - Locale: nothing reads it. JSON and messages have a decimal point in every locale.
 *  - Stack: a call takes less than 32 KiB of the caller's stack, callbacks not counted, where no GPU is used. The library's own
 *    threads have stacks of 1 MiB.
 *  - Signals: the library's threads block them, but for faults and SIGPROF. Handlers run on the host's threads, in the middle of calls
 *    too, with or without SA_RESTART. A handler may call kv_cancel_fire and nothing else.
 *  - fork: a child process must not use the handles of its parent, nor close them; it may call exec. All descriptors are closed by
 *    exec.
 *  - dlclose: close all handles first. The library stays mapped until the process ends, because allocator state of the host's threads
 *    belongs to it. Loading it again finds it there.
 *  - Handles: parents are retained by their children, so the order of closing does not matter. Closing NULL does nothing.
 *  - Threads: a kv_model may be used by any number of threads. A kv_session serves one call at a time, from any thread; a second
 *    concurrent call gets KV_BUSY and changes nothing. Closing a handle while a call on it runs is the caller's error. A session or a
 *    cache and all its forks share one team of threads, and may be called at the same time.
 */
#ifndef KVASIR_H
#define KVASIR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32) && defined(KVASIR_EXPORTS) /* while the library itself is built */
#define KV_API __declspec(dllexport)
#elif defined(_WIN32)
#define KV_API
#elif defined(__GNUC__)
#define KV_API __attribute__((visibility("default")))
#else
#define KV_API
#endif

/* ---- status --------------------------------------------------------------------------------------------------------- */

/* What a call returns: one of the numbers below. */
typedef int32_t kv_status;

/* Numbers never change; new ones may be added. */
enum {
  KV_OK = 0,
  KV_CANCELLED = 1,    /* a cancel token fired or a callback returned non-zero */
  KV_BAD_ARGUMENT = 2, /* NULL, a wrong struct_size, a value out of its range */
  KV_BUSY = 3,         /* another call on this session is running */
  KV_BAD_STATE = 4,    /* the call does not fit what happened before; the message says what does */
  KV_NO_MEMORY = 5,
  KV_LIMIT = 6,    /* a limit of the system or of the options: open files, threads, sizes */
  KV_IO = 7,       /* reading or writing failed; sys_errno says how */
  KV_NO_SPACE = 8, /* disk full, quota or file size limit */
  KV_NOT_FOUND = 9,
  KV_PERMISSION = 10,
  KV_NOT_A_CACHE = 11,    /* the file is something else */
  KV_VERSION = 12,        /* written by a newer library: stale */
  KV_CORRUPT = 13,        /* damaged; offset says where */
  KV_MODEL_MISMATCH = 14, /* a cache of another model: stale */
  KV_UNSUPPORTED =
      15, /* a good file with something this library does not do; the message names it */
  KV_CONTEXT_FULL = 16, /* the model's or the session's context length is reached */
  KV_INTERNAL = 17,     /* a bug in Kvasir */
  KV_DEVICE =
      18 /* a GPU failed or was lost: close the sessions and the model that use it. From every call that runs such a model */
};

/* Filled by a failing call. `message` is one line that names the subject and says what stayed unchanged.
 * It is printable UTF-8: other bytes and characters of a file or a path are spelled out, as "\x0A" and
 * "\u{202E}". */
typedef struct kv_error {
  kv_status status;  /* what the call returned */
  int32_t sys_errno; /* 0 when none */
  uint64_t offset;   /* in a file, bytes; UINT64_MAX when none */
  char message[384]; /* always terminated */
} kv_error;

/* A short constant English text for a status, "unknown status" for others. Any thread. */
KV_API const char* kv_status_text(kv_status status);

/* 1 when a cache was refused because it is of another version or model: delete it and prefill again, nothing is broken. */
KV_API int32_t kv_status_is_stale(kv_status status);

/* ---- library -------------------------------------------------------------------------------------------------------- */

#define KV_VERSION_NUMBER 100 /* major * 10000 + minor * 100 + patch, of this header */

/* The same of the library that was loaded. */
KV_API uint32_t kv_version(void);

/* JSON: version, cache format, compiler, kernels that this processor gets, backends of this build ("cpu", "cuda"), third-party versions. Valid
 * for ever. */
KV_API const char* kv_build_info(void);

/* How much a line of the log matters. */
typedef enum kv_log_level { KV_LOG_WARNING = 1, KV_LOG_INFO = 2 } kv_log_level;

/* One line without a newline, valid during the call. May be called from any thread that calls the library, by several at once. It and its user
 * pointer stay in use until the handle that they were given to and all that came from it (sessions of a library, forks) are closed. */
typedef void (*kv_log_fn)(int32_t level, const char* message, void* user);

/* ---- cancel --------------------------------------------------------------------------------------------------------- */

/* Stops the calls it was given to within 100 ms of CPU time, summed over their threads. They return
 * KV_CANCELLED, or KV_OK where nothing that was asked for was left to do. Every call that can take
 * longer than 100 ms takes one, except as its entry says. The system's own work is not interrupted:
 * a write that waits for the disk (fsync), a read of a page from a slow disk, the opening of a GPU
 * by its driver, and the release of what the call had made: a file that was partly written or
 * spilled takes about 55 ms per GB. Nor is the wait of kv_library_open, kv_library_rename and
 * kv_library_remove for another process. */
typedef struct kv_cancel kv_cancel;

/* *out is released with kv_cancel_release, after the calls that use it. KV_NO_MEMORY. */
KV_API kv_status kv_cancel_create(kv_cancel** out, kv_error* error);
/* From any thread or a signal handler, any number of times. NULL does nothing. */
KV_API void kv_cancel_fire(kv_cancel* cancel);
/* Makes it usable again. A call that has seen it fired stays cancelled. */
KV_API void kv_cancel_reset(kv_cancel* cancel);
/* Of what kv_cancel_create made, once. */
KV_API void kv_cancel_release(kv_cancel* cancel);

/* What a long call is at. */
typedef enum kv_phase {
  KV_PHASE_OPEN = 1,    /* not reported by this version */
  KV_PHASE_PREFILL = 2, /* tokens read */
  KV_PHASE_SAVE = 3,    /* bytes written */
  KV_PHASE_VERIFY = 4,  /* bytes checked */
  KV_PHASE_PREPARE = 5, /* steps of making what a strategy needs beside keys and values */
  KV_PHASE_PACK = 6,    /* bytes of the document packed */
  KV_PHASE_UNPACK = 7   /* bytes of the document restored */
} kv_phase;

/* At most ten calls a second, and one at the end of the work. total is 0 while unknown. */
typedef int32_t (*kv_progress_fn)(int32_t phase, uint64_t done, uint64_t total, void* user);

/* ---- model ---------------------------------------------------------------------------------------------------------- */

/* A model's weights (a mapped GGUF file), tokenizer and chat format. Immutable; reference-counted. */
typedef struct kv_model kv_model;

/* How a model is opened. */
typedef struct kv_model_options {
  uint32_t struct_size;
  uint32_t flags; /* 0 */
  kv_log_fn log;  /* NULL: silent */
  void* log_user;
  /* NULL: recognised from the file's template, never executed; or one of "raw" "chatml" "llama3" "llama2" "mistral" "mistral-v3"
   * "mistral-tekken" "gemma" "phi" "phi4" "deepseek" "deepseek-v2" "zephyr".
   * A saved file keeps the format of its turns. kv_load uses that format where this is NULL, and
   * refuses the file where this names another one (KV_MODEL_MISMATCH). */
  const char* chat_format;
  /* Where the weights are multiplied:
   *   NULL, "cpu"        on the CPU, from the mapped file
   *   "cuda", "cuda:1"   the first NVIDIA GPU, or that one, has a copy of the first layers, as many as fit, and of the output; sessions of the model
   *                      compute these there
   *   "cuda:0,cuda:1"    several (any list; one may be named twice), or "cuda:all", those that are new enough and can be opened: the layers are split over them in this
   *                      order, by the memory that each may take. One works while the others wait: they are for models that do not fit one
   *   "auto"             the GPU with the most room, where the whole model fits, or all of them; where there is none that has room for a layer, the
   *                      processor. kv_stats says which and why ("device": "cuda:0", "cpu"; "device_because"), and so does log, at KV_LOG_INFO
   * But for "auto", KV_NOT_FOUND without such a GPU or a driver, KV_UNSUPPORTED where the library was built without CUDA.
   * Keys and values stay in host memory or the mapped file. Texts that are read exactly the GPU attends in its layers, over a copy of the
   * sealed pages that it has as long as it reads (heads of up to 128, no memory_budget, more than 64 tokens). What is asked and answered by the strategy
   * "bounded" it attends too: it has a sketch of the keys and the newest tokens, chooses, and reads what it chose where that lies, for which that memory
   * is pinned (of a long text some with each token, and until all of it is the CPU hands it what it chose: kv_prepare); what it has read it keeps for
   * the next token where there is room. Where the system lets no memory be pinned, or the pages are more than three quarters of the machine's, the CPU goes on to
   * (kv_stats: "device_reads_pages" and why not). By the other strategies, where dense layers or separate heads are asked for and where everything is attended,
   * the two attend side by side: the CPU chooses and attends pages, the GPU the newest and the first tokens and, of one token, as large a part of the pages
   * as it reads over the bus while the CPU attends the others. How fast both are is measured once for a GPU and a number of threads, by kv_prepare or the
   * first such token; what filter layers choose for the layers after them the GPU reads in one go and keeps for the next token, where there is room ("co_execution",
   * and "co_execution_share" says how they share). Sparse reading, a memory_budget, certificates, comparisons and traced answers are attended
   * by the CPU alone. kv_stats says who did ("device_attends": of several GPUs all, or which one did not) and why, how many layers and bytes
   * there are, as sums and, under "devices", of each GPU. As much of host memory as an 85th of what a GPU has of the weights, from 6 to 96 MiB, is
   * pinned for what goes to it and comes from it, as long as the model is open, and more where a session's window wants more. */
  const char* device;
  /* Bytes of each GPU's memory, as often as it is named, that the model and its sessions may take; 0: what is free. Not one layer fits: KV_NO_MEMORY, and the message says what
   * would. A session for whose attention there is no room left, or a text of whose pages, is attended by the CPU. */
  uint64_t device_memory;
  kv_cancel* cancel; /* of kv_open, until it returns; NULL: cannot be cancelled */
  /* A folder for the hashes of whole model files. It is created if it is missing, its parents are not.
   * NULL: nothing is hashed, read or written. Otherwise a thread of low priority reads the file once,
   * takes at most a quarter of a core, and ends with the model. It keeps the hash in the folder's file
   * "model-hashes" with the model file's size, times and inode. Later openings of the unchanged file find
   * it there. A folder that cannot be written is no error: each opening then computes the hash. Several
   * models and processes may use one folder. */
  const char* hash_folder;
} kv_model_options;

/* All defaults; size is sizeof *options. */
KV_API void kv_model_options_init(kv_model_options* options, size_t size);

/* Maps a GGUF file and checks all of its metadata and tensor shapes; weights are read when they are used. The file must not be changed
 * while the model is open. *out is closed with kv_close.
 * KV_NOT_FOUND, KV_PERMISSION, KV_IO; KV_CORRUPT (damaged, contradictory, or a hole in place of weights); KV_UNSUPPORTED (not a GGUF; an architecture,
 * weight type, tokenizer or feature that is not supported, named in the message); KV_LIMIT (open files; keys, tensors or
 * tokens that are too many or too long, named too: at most 1,048,576 tokens, 2,097,152 merges, 1,024
 * layers, 1,024 heads, a width of 65,536 and a hidden layer of 262,144); KV_NO_MEMORY; KV_DEVICE;
 * KV_CANCELLED. */
KV_API kv_status kv_open(const char* path, const kv_model_options* options, kv_model** out,
                         kv_error* error);

/* One more reference, to be closed as well. Returns the same pointer. */
KV_API kv_model* kv_retain(kv_model* model);
/* Gives one reference back; with the last one, also those that sessions have, the file is unmapped. */
KV_API void kv_close(kv_model* model);

/* What a model is. */
typedef struct kv_model_information {
  uint32_t struct_size;        /* in: set by the caller to sizeof */
  uint32_t layers;             /* transformer blocks */
  uint32_t width;              /* of the residual stream */
  uint32_t heads;              /* query heads of a layer */
  uint32_t kv_heads;           /* key/value heads of a layer */
  uint32_t head_dim;           /* elements of a head */
  uint32_t feed_forward;       /* width of its hidden layer */
  uint32_t vocabulary;         /* tokens */
  uint64_t context;            /* tokens the model was trained for */
  uint64_t parameters;         /* numbers in the weights */
  uint64_t weight_bytes;       /* in the file */
  uint64_t kv_bytes_per_token; /* in the store, scales and summaries included */
  char architecture[32];       /* of the GGUF: "llama", "qwen3" */
  char name[64];        /* the model's own, printable as a message is, cut where it is longer */
  char weights[96];     /* number formats, most used first: "Q4_K Q6_K F32" */
  char tokenizer[32];   /* of the GGUF: "gpt2", "llama" */
  char chat_format[16]; /* one of kv_model_options.chat_format */
  char fingerprint[72]; /* of metadata, tensor table and samples of the weights: 64
                                * hexadecimal digits; caches belong to it */
  char hash[40];        /* of the whole file: 32 hexadecimal digits; "" until it is known
                                * (kv_model_options.hash_folder, kv_model_hash). A cache that was
                                * saved while it was known is refused by a model with another one */
} kv_model_information;

/* Fills *info up to the struct_size it came with. Any thread. */
KV_API kv_status kv_model_info(const kv_model* model, kv_model_information* info, kv_error* error);

/* The same without opening the model for use: reads metadata and no weights, in about 50 ms for a
 * vocabulary of 128,000 tokens. Errors as kv_open. */
KV_API kv_status kv_model_inspect(const char* path, kv_model_information* info, kv_error* error);

#define KV_TOKENIZE_SPECIAL \
  1u /* text that spells a control token becomes that token (otherwise it is text) */
#define KV_TOKENIZE_BOS 2u /* begin with the begin-of-text token, if the model wants one */
#define KV_TOKENIZE_DOCUMENT \
  4u /* as kv_prefill reads the text into an empty session: that token, and the opening of the chat format's turn */

/* Writes up to `capacity` ids to tokens (NULL if 0) and the number that the whole text has to *count, whatever the capacity.
 * KV_LIMIT when capacity is too small (what fits has been written). KV_CANCELLED: nothing was
 * written. cancel: NULL: cannot be cancelled. Any thread. Time is linear in the size. */
KV_API kv_status kv_tokenize(const kv_model* model, const char* text, size_t size, uint32_t flags,
                             kv_cancel* cancel, int32_t* tokens, size_t capacity, size_t* count,
                             kv_error* error);

/* The reverse: bytes to text, their number to *size. Control tokens are left out unless KV_TOKENIZE_SPECIAL. Not terminated. Where the tokenizer
 * begins a text with a space of its own (SentencePiece), that of the first token is left out. */
KV_API kv_status kv_detokenize(const kv_model* model, const int32_t* tokens, size_t count,
                               uint32_t flags, char* text, size_t capacity, size_t* size,
                               kv_error* error);

/* ---- session -------------------------------------------------------------------------------------------------------- */

/* One sequence of tokens with its keys and values. */
typedef struct kv_session kv_session;

/* How keys and values are kept. */
typedef enum kv_kv_type {
  KV_KV_INT8 = 0, /* int8 pages behind a full-precision window */
  KV_KV_F32 =
      1 /* everything stays in full precision and is attended in full: the reference; costs 7 times the memory */
} kv_kv_type;

/* What a filter layer chooses by: the share of attention that tokens get of */
typedef enum kv_filter_window {
  KV_FILTER_LAST = 0,        /* the newest query */
  KV_FILTER_EXPONENTIAL = 1, /* the newest 16, each counting twice as much as the one before it */
  KV_FILTER_UNIFORM = 2      /* the newest 16 alike */
} kv_filter_window;

/* How a budget is spread over the layers that choose. Its mean is the same. */
typedef enum kv_budget_schedule {
  KV_BUDGET_UNIFORM = 0, /* the same in all */
  KV_BUDGET_LINEAR =
      1, /* evenly less from layer to layer: from 3/2 of the mean in the first to 1/2 in the last */
  KV_BUDGET_PYRAMID = 2 /* the same from 39/20 to 1/20 (PyramidKV) */
} kv_budget_schedule;

/* How a sequence is kept, read and answered from. */
typedef struct kv_session_options {
  uint32_t struct_size;
  uint32_t
      threads; /* 0: as many as the process has processors; the caller's thread is one of them */
  uint64_t
      context; /* tokens the sequence may hold; 0: what the model was trained for. More is refused */
  uint32_t kv_type; /* kv_kv_type */
  uint32_t window;  /* newest tokens kept in full precision and always attended; 0: 64 */
  uint32_t
      prefill_chunk; /* tokens read together, 1 to 4096; 0: chosen, 512 (1024 on a GPU) or less where that would take much memory */
  /* Layers that attend everything; UINT32_MAX: the strategy's default (quest: 2, bounded: 0). Which: those that a choice of pages serves
   * worst, measured while the document was read; the first ones while less than 2048 tokens are sealed. kv_stats tells. */
  uint32_t dense_layers;
  /* What decode reads: NULL or "auto", or the name of a strategy (kv_strategy_info lists them): "full", "window", "quest", "flat", "dipr",
   * "bounded", "hnsw", "ood", "dipr-graph", "ivf", "filter-layers", "infllm", "snapkv". "auto" is "full" up to 4096 sealed
   * tokens, then "bounded". */
  const char* strategy;
  uint64_t
      budget_tokens; /* tokens a layer and head may read besides sinks and window, on average over layers; 0: use the fraction */
  double
      budget_fraction; /* of the sealed tokens, 0 to 1; 0: the strategy's default (quest, flat, hnsw, ood, ivf: 0.02, bounded: 0.01,
                              * filter-layers: 0.067, of these at least 512 tokens; infllm, snapkv: 0.05, at least 1024; dipr and dipr-graph,
                              * for which it is a ceiling: 0.1, at least 1024) */
  uint32_t
      share_heads; /* 1 (default): query heads of a group choose together; 0: a choice for each */
  float
      alpha; /* dipr and dipr-graph read the tokens with at least this part of the largest token's attention, 0 to 1; 0: 0.012 */
  kv_log_fn log; /* NULL: silent */
  void* log_user;
  /* Of the strategy "filter-layers", in which some layers choose tokens for those after them: which layers, numbered from 0, ascending, as
   * "2,8,18". NULL: three (in models of less than 24 layers one in eight), spread evenly. Layers up to the first one, these and the layer after
   * each attend everything; dense_layers is not used. */
  const char* filter_layers;
  uint32_t filter_window; /* kv_filter_window */
  /* For measurement, at the cost of full attention. 1: each token that decode attends is also attended exactly and compared, and kv_stats has
   * it under "compared", of the last answer: for each layer and KV head, over query heads and tokens, the share of the exact attention that was
   * read ("mass"), the relative error of the output ("error"), the share of the 100 tokens with the largest scores that were read ("recall"); of
   * a strategy with an index also what the search of a query head scans, were it alone ("search_keys"), and its recall ("search_recall").
   * 2: also how alike the layers are, of the newest token of each step: "covered"[i][j] is the share of layer j's attention that sinks, window
   * and the 5% of the tokens that layer i attends most hold. 0 (default): neither. */
  uint32_t compare;
  /* Of the strategy "quest": neighbouring tokens that are chosen together, a multiple of 16 (of 8 where a head is longer than 128 elements) up
   * to 1024; 0: 16 (8). Others do not take it: KV_BAD_ARGUMENT. */
  uint32_t select_tokens;
  /* 1: each token that decode attends by chosen pages gets a certificate: how much of its exact attention was read at least, whatever the keys
   * are, from Quest's upper bounds of all that was not read. Costs a scan of these bounds; kv_stats has it as last_certificate (the mean of
   * query heads and tokens) and last_least_certificate. Samples of "bounded" do not count as read. Such bounds are loose: of a long document they may
   * leave next to nothing certain. With it, as with `compare` and where an answer is traced, each token of a question chooses for itself, which takes
   * longer: otherwise those of "bounded" choose together. 0 (default): no certificate. */
  uint32_t certify;
  /* How documents are read behind their first 4096 tokens: NULL or "full": exactly. "bounded", "quest", "flat", "filter-layers" or "window": sparsely,
   * several times faster where the text is long: about forty neighbouring tokens read the same tokens before them, which that strategy chooses by the
   * queries of every second one, with sinks, window and the newest 512 tokens. "bounded" answers nearest to exact reading. "filter-layers": the
   * filter layers read everything and choose for those behind them. What was read so is a little different from the exact keys and values; kv_stats
   * says how far (sparse_tokens). */
  const char* prefill_strategy;
  double
      prefill_budget_fraction; /* chosen of the tokens before, 0 to 1; 0: 0.1; at least 2048 in any case */
  uint64_t
      prefill_exact_tokens; /* of each kv_prefill the last so many tokens are read exactly all the same */
  /* Of the strategy "bounded", which reads what should get much attention for certain, and of all the rest a sample that stands for it: read as
   * many tokens as keep the standard error of the sampled attention below 1 - coverage, 0 to less than 1, as the sketch expects it, in each layer
   * between a quarter of the budget and four times it; 0: 0.96 with the default budget, else what the budget says, for every token alike. How many a
   * step reads is left to chance, around these numbers. Others do not take it: KV_BAD_ARGUMENT. */
  float coverage;
  /* How far strategies with an index search it: "hnsw", "ood", "dipr-graph": the tokens a search keeps at a time, at least 64; "ivf": the
   * clusters it reads. 0: as the budget needs; "ood": an eighth of it, at least 128. */
  uint32_t search_breadth;
  uint32_t
      budget_schedule; /* kv_budget_schedule. Other than uniform is refused for "auto" and strategies without a budget or that spread it */
  /* Of "ood" and "dipr-graph": 0 (default): the query heads of a group share one graph, made from the queries of all; 1: each has one, from its
   * own queries, of that size and making time each. Others do not take it: KV_BAD_ARGUMENT. */
  uint32_t head_graphs;
  /* Bytes of memory that keys, values and all that is kept with them may take; 0 (default): no limit. Pages beyond it are written to a file without a
   * name (on Windows: one that its process's end removes) in spill_folder, or stay in the file that was loaded, and are read where they are needed; answers are the same, bit for bit. The
   * window, the summaries (about a fifth of what keys and values take) and the pages that a step fills have to fit: KV_LIMIT says what that is,
   * before anything is read. While the sketch is found again, as a text grows, it is there twice (a tenth of them). Weights and workspace are not counted. Not with KV_KV_F32: KV_BAD_ARGUMENT. */
  uint64_t memory_budget;
  /* On a local disk (in a folder whose files are kept in memory nothing would be won). NULL:
   * /var/tmp, on Windows the folder for temporary files. A relative path is resolved when the
   * session is opened. No other user can open the file, and it is gone with the last session
   * that uses it, also when the process is killed. It is tried when a session is opened or loaded with a budget: KV_NOT_FOUND, KV_PERMISSION,
   * KV_NO_SPACE. */
  const char* spill_folder;
} kv_session_options;

/* All defaults; size is sizeof *options. */
KV_API void kv_session_options_init(kv_session_options* options, size_t size);

/* What a strategy is called and takes. */
typedef struct kv_strategy_information {
  uint32_t struct_size;         /* in: set by the caller to sizeof */
  uint32_t dense_layers;        /* the default of that option; UINT32_MAX: all */
  double budget_fraction;       /* likewise */
  uint64_t budget_floor;        /* tokens that the default fraction is at least */
  uint32_t takes_budget;        /* 0: reads the same whatever the budget */
  uint32_t takes_select_tokens; /* 1: the option of that name is for it */
  char name[32];                /* as kv_session_options.strategy takes it */
  uint32_t takes_coverage;      /* likewise */
  uint32_t takes_head_graphs;   /* likewise */
} kv_strategy_information;

/* Fills *info, up to the struct_size it came with, for the strategy of an index: 0, 1 and so on, KV_NOT_FOUND after the last. "auto" is
 * not among them: it is a choice of one. Any thread. */
KV_API kv_status kv_strategy_info(uint32_t index, kv_strategy_information* info, kv_error* error);

/* An empty sequence. *out is closed with kv_session_close. KV_BAD_ARGUMENT (unknown strategy, ranges), KV_NO_MEMORY, KV_LIMIT. */
KV_API kv_status kv_session_open(kv_model* model, const kv_session_options* options,
                                 kv_session** out, kv_error* error);
/* Ends the sequence; what it shares with forks stays with them. */
KV_API void kv_session_close(kv_session* session);

/* Changes what decode reads from now on, as the options of the same names do; other options stay, select_tokens where the new strategy takes
 * it. KV_BAD_ARGUMENT leaves it as it was. */
KV_API kv_status kv_session_set_strategy(kv_session* session, const char* strategy,
                                         uint64_t budget_tokens, double budget_fraction,
                                         kv_error* error);

/* Of a call that takes long. */
typedef struct kv_call_options {
  uint32_t struct_size;
  uint32_t
      flags; /* kv_prefill: KV_TOKENIZE_SPECIAL; those that kv_file_verify and kv_session_from_cache name; others: 0 */
  kv_cancel* cancel;       /* NULL: cannot be cancelled but by the callback */
  kv_progress_fn progress; /* NULL: none */
  void* progress_user;
} kv_call_options;

/* All defaults; size is sizeof *options. */
KV_API void kv_call_options_init(kv_call_options* options, size_t size);

/* Reads the model's whole file and hashes it on the calling thread, unless the hash is known.
 * kv_model_info has it afterwards. kv_model_options.hash_folder keeps it where there is one, unless the
 * file was written within the last two seconds.
 * Reports KV_PHASE_VERIFY, in bytes. Any thread; a second call waits for the first.
 * KV_CANCELLED, KV_IO, KV_CORRUPT (the file was changed while it was open), KV_NO_MEMORY: the hash
 * stays unknown. */
KV_API kv_status kv_model_hash(kv_model* model, const kv_call_options* options, kv_error* error);

/* Makes now what the strategy needs beside keys and values, where the sequence does not have it: the index that it searches, the sketch of
 * "bounded", or the representatives of "infllm", for which all of a text that an older library saved is read again. Otherwise it is made
 * before the next question (kv_generate, kv_score) or save. kv_next makes no index: where there is none it scores every token. An index is
 * saved with the sequence and shared by forks, so that it can be made on a fork, in another thread. What has been sealed since is scored token by
 * token, until this call, kv_generate, kv_score or kv_save inserts it into the graph of "ood", where the memory_budget has room for it; the index
 * is made again when it has to do with a quarter more than it was made for, or when head_graphs asks for another number of graphs: until then
 * kv_next searches the one that there is, which the log says once. A GPU that will attend by the session's strategy gets all that it reads of the
 * sequence now; otherwise it may read some more of a long one with each token, and until then the CPU hands it the pages that it chose (kv_stats:
 * "device_reads_pages"), so that an answer begins at once. The memory that is pinned and what the GPU has to choose by serve forks too while
 * the session is open: who forks for each question prepares first. A GPU also looks for the nearest keys from which the index of "ood" is made, where its
 * device_memory has room for one head's keys and 70 MiB, of a million tokens 130 (kv_stats: "index_nearest_by").
 * Progress: KV_PHASE_PREPARE. KV_CANCELLED, KV_NO_MEMORY, KV_LIMIT (memory_budget), KV_CORRUPT, KV_DEVICE, KV_BUSY. */
KV_API kv_status kv_prepare(kv_session* session, const kv_call_options* options, kv_error* error);

/* Adds document text at the end of the sequence, in the turn that the model's chat format has for it. Several calls continue one
 * document. Attention is exact over everything before, unless prefill_strategy says otherwise. When cancelled it keeps whole chunks, but no
 * turn into which nothing was read: *tokens_done (may be NULL) tells in every case how many tokens were added, *bytes_done (may be NULL) at
 * which byte of the text they end. A later call with the rest of the text goes on there, with the tokens that this call would have read: always where a word begins at
 * that byte; within a word the rest of it may be cut into other tokens, which spell the same text.
 * Behind the last token the sketch of "bounded" is found. A cancel from there on returns KV_OK: the
 * whole text was added, and the next call that needs the sketch (kv_prepare, kv_generate, kv_score,
 * kv_next, kv_save, another kv_prefill) finds it, the same one.
 * KV_CANCELLED, KV_CONTEXT_FULL (nothing was added), KV_BAD_STATE (a conversation has begun), KV_NO_MEMORY, KV_CORRUPT (a damaged page
 * of a mapped file, or weights that make a number that is not finite: the chunk was not added), KV_BUSY. */
KV_API kv_status kv_prefill(kv_session* session, const char* text, size_t size,
                            const kv_call_options* options, uint64_t* tokens_done,
                            uint64_t* bytes_done, kv_error* error);

/* The same with the caller's own tokens: no turn is opened, no special token added. */
KV_API kv_status kv_prefill_tokens(kv_session* session, const int32_t* tokens, size_t count,
                                   const kv_call_options* options, uint64_t* tokens_done,
                                   kv_error* error);

/* As kv_prefill_tokens, and logits: float32 [count][vocabulary] receives the logits at each token. For measurement. When it fails midway,
 * whole chunks stay, as kv_session_tokens tells, and the logits of the others are not written. */
KV_API kv_status kv_prefill_logits(kv_session* session, const int32_t* tokens, size_t count,
                                   float* logits, const kv_call_options* options, kv_error* error);

/* Whole UTF-8 characters of an answer as they are made. Non-zero stops the answer: KV_CANCELLED. */
typedef int32_t (*kv_text_fn)(const char* text, size_t size, void* user);

/* How a question is answered. */
typedef struct kv_generate_options {
  uint32_t struct_size;
  uint32_t max_tokens;      /* of the answer; 0: 512 */
  float temperature;        /* 0 (default): greedy */
  uint32_t top_k;           /* 0: off */
  float top_p;              /* 1: off */
  float min_p;              /* 0: off */
  float repetition_penalty; /* 1: off; over the last 256 tokens */
  uint32_t
      keep; /* 0 (default): afterwards the sequence is back where it was, exactly; 1: the turn stays in it */
  uint64_t
      seed; /* the same seed and input give the same answer; where a GPU attends, after kv_prepare and with one model open (sums end in other bits) */
  const char* const* stop; /* NUL-terminated strings that end the answer and are not part of it */
  uint32_t stop_count;     /* strings of stop */
  uint32_t flags;          /* KV_TOKENIZE_SPECIAL applies to the question */
  kv_cancel* cancel;       /* NULL: cannot be cancelled but by the callbacks */
  kv_progress_fn progress; /* while the question is read */
  void* progress_user;
  /* 1: what the answer attends of the document is noted, for kv_trace. The answer is the same, and later by what scoring the tokens that were read
   * once more takes; a GPU leaves attention to the CPU meanwhile. 0 (default): it is not. */
  uint32_t trace;
  uint32_t reserved; /* 0 */
} kv_generate_options;

/* All defaults; size is sizeof *options. */
KV_API void kv_generate_options_init(kv_generate_options* options, size_t size);

/* Why an answer ended. */
typedef enum kv_stop_reason {
  KV_STOP_END_OF_TURN = 1,
  KV_STOP_STRING = 2,
  KV_STOP_MAX_TOKENS = 3,
  KV_STOP_CONTEXT_FULL = 4,
  KV_STOP_CANCELLED = 5
} kv_stop_reason;

/* What an answer was and took. */
typedef struct kv_answer {
  uint32_t struct_size;     /* in: set by the caller to sizeof */
  uint32_t stop_reason;     /* kv_stop_reason */
  uint64_t question_tokens; /* with the marks of the turn */
  uint64_t answer_tokens;   /* made, the end of the turn not counted */
  uint64_t first_token_ns;  /* from the call to the first token */
  uint64_t total_ns;        /* from the call to its return */
  uint64_t
      tokens_read; /* summed over the decode steps, layers and KV heads: store tokens whose K and V were read */
  uint64_t tokens_present; /* and how many full attention would have read */
} kv_answer;

/* Asks: puts the question in the model's turn, answers it through on_text (may be NULL). answer (may be NULL) is filled also when
 * the call is stopped. With keep, a stopped or failed call leaves the tokens made so far, perhaps
 * without the last one, which on_text may have had; without, the sequence is as before.
 * KV_CANCELLED, KV_CONTEXT_FULL (the question does not fit), KV_BAD_STATE (an empty sequence, and a question without a token), KV_NO_MEMORY, KV_LIMIT
 * (memory_budget has no room for the question, or for an index that the strategy wants: nothing was read), KV_CORRUPT (a damaged page of a mapped
 * file was met), KV_BUSY. */
KV_API kv_status kv_generate(kv_session* session, const char* question, size_t size,
                             const kv_generate_options* options, kv_text_fn on_text, void* user,
                             kv_answer* answer, kv_error* error);

/* Pull style: one more token after what is in the sequence (raw continuation; no turn is opened), sampled as the options say (max_tokens, stop,
 * keep, trace and callbacks are not used), appended to the sequence. *token is its id; *end is 1 when it ends the turn (may be NULL).
 * KV_BAD_STATE on an empty sequence; KV_CONTEXT_FULL; KV_CANCELLED: the sequence is as it was. */
KV_API kv_status kv_next(kv_session* session, const kv_generate_options* options, int32_t* token,
                         int32_t* end, kv_error* error);

/* How likely the model finds a given continuation: log_probabilities[i], float32 [count], receives the natural logarithm of the probability
 * of tokens[i] after everything before it, each read one at a time as decode reads, through the strategy. The sequence is afterwards where
 * it was, exactly. For measurement: exp(-mean) is the perplexity. kv_stats then tells of these steps as of an answer's.
 * KV_CANCELLED, KV_BAD_STATE (empty sequence), KV_CONTEXT_FULL, KV_NO_MEMORY, KV_LIMIT (as kv_generate), KV_CORRUPT, KV_BUSY. */
KV_API kv_status kv_score(kv_session* session, const int32_t* tokens, size_t count,
                          float* log_probabilities, const kv_call_options* options,
                          kv_error* error);

/* Tokens in the sequence. */
KV_API kv_status kv_session_tokens(const kv_session* session, int32_t* tokens, size_t capacity,
                                   size_t* count, kv_error* error);

/* Goes back to the first `tokens` tokens. Tokens that had left the window come back with the precision of their pages. What comes next is computed anew from
 * the last token, which rounds otherwise than where many were read together: a near tie may end the other way.
 * No cancel: for an 8B model it takes about 10 ms with the default window, and in proportion more
 * with a larger one.
 * KV_BAD_ARGUMENT when there are fewer. */
KV_API kv_status kv_rewind(kv_session* session, uint64_t tokens, kv_error* error);

/* A second sequence that begins as an exact copy: pages are shared, each session writes only its own tail. The fork has the same options. */
KV_API kv_status kv_fork(kv_session* session, kv_session** out, kv_error* error);

/* Neighbouring tokens of the sequence. */
typedef struct kv_span {
  uint64_t
      first_token; /* kv_session_tokens numbers them; kv_detokenize of these is the passage's text */
  uint64_t tokens;   /* 1 or more */
  float share;       /* of all that was noted, 0 to 1 */
  uint32_t reserved; /* 0 */
} kv_span;

/* The passages of the document that the last answer attended, the largest share first: where the model looked, which is not a proof of what it says.
 * For an answer of kv_generate with trace = 1, also one that was stopped. Noted is the attention of the question's last token, which gives the
 * answer's first one, and of the answer's tokens that were read, in every layer and query head: a block of 16 tokens (8 where a head is longer than
 * 128 elements) gets the square of the share of attention that it had, so that heads that look for something count and those that look everywhere do
 * not. Only what the strategy read counts: of a sample itself, not what it stands for; not the sequence's first 4 tokens, on which attention rests
 * whatever they say, nor conversation behind the document. Blocks with at least a twentieth of what the largest one has are told, 64 passages at most; neighbouring
 * ones are one passage, so it may begin and end within a word. How much of the document was read kv_answer says.
 * Writes up to `capacity` spans (NULL if 0) and how many there are to *count, whatever the capacity; none: *count is 0. The session keeps them until
 * kv_generate, kv_score, kv_next, kv_prefill or kv_rewind begins to change the sequence; a fork begins without, and kv_save does not save them.
 * KV_BAD_STATE (the last answer was not traced, or the sequence has changed since), KV_LIMIT (capacity is too small: what fits has been written),
 * KV_NO_MEMORY, KV_BUSY. */
KV_API kv_status kv_trace(kv_session* session, kv_span* spans, size_t capacity, size_t* count,
                          kv_error* error);

/* JSON about the sequence and the last decode: tokens, sealed pages, window, strategy asked and planned and why, budget, tokens read, pages
 * touched, bytes of memory and of mapped file, timings. Of "bounded" last_mass_read is the share of the attention that was read for certain, as it
 * estimates; the rest is estimated from samples. Where this session has made the index of "ood", index_nearest_by says who looked for the nearest keys
 * that it is made from ("cuda:0", "processor", "cuda:0,processor"), the same ones in any case, and index_nearest_because why a GPU that the model has did
 * not. Writes up to capacity bytes with a final NUL, *size is what it takes with the NUL; KV_LIMIT when
 * capacity is too small. */
KV_API kv_status kv_stats(kv_session* session, char* json, size_t capacity, size_t* size,
                          kv_error* error);

/* ---- persistence ---------------------------------------------------------------------------------------------------- */

/* Writes the sequence to a file, atomically: the path holds the old file or the complete new one, durably, whatever happens.
 * A new file holds the document and is for its owner alone (mode 0600, less the umask). One that
 * replaces another gets its mode and access list, and its owner and group where the system lets the
 * process give them; where it keeps another group, that gets the rights of everybody. A symbolic
 * link is followed: the file that it leads to is replaced, and the link stays. A link to no file
 * (KV_BAD_ARGUMENT) and one of another user, unless root or the folder's owner made it
 * (KV_PERMISSION), are refused. On Windows a file has the access list of its folder. All this holds
 * for kv_cache_save, kv_pack and kv_unpack too.
 * A sketch that a cancel kept kv_prefill from finding is found first. The index of the strategy is
 * made or brought up to date first, as by kv_prepare; where the memory_budget has no room for it
 * the sequence is saved with the index that it has, or none, which the log says.
 * KV_NO_SPACE, KV_PERMISSION, KV_IO, KV_CANCELLED, and KV_CORRUPT where pages of a loaded file are
 * damaged or made numbers that are not finite, so that the new file could not be loaded: the old
 * file stays. Not cancelled is the last part, which waits until the disk has the file and gives it
 * its name. options may be NULL. */
KV_API kv_status kv_save(kv_session* session, const char* path, const kv_call_options* options,
                         kv_error* error);

#define KV_LOAD_VERIFY 1u /* check the whole file now, not each part when it is first used */

/* A new session over a saved sequence, mapped: its pages are read when they are used, their checksums now. session_options as for kv_session_open, but
 * window and kv_type are the file's: one in full precision is refused with a memory_budget (KV_BAD_ARGUMENT). options->flags: KV_LOAD_VERIFY. The
 * file may be replaced or removed by name afterwards, but not cut or written in place.
 * Questions get turns of the file's chat format, whatever was recognised in the model. kv_stats
 * names it ("chat_format"). KV_MODEL_MISMATCH where kv_model_options named another one, or where
 * this library does not know it. A file of an older library names no format: the model's is used.
 * KV_NOT_FOUND, KV_NOT_A_CACHE, KV_VERSION and KV_MODEL_MISMATCH (stale), KV_CORRUPT, KV_CONTEXT_FULL, KV_LIMIT (memory_budget), KV_IO,
 * KV_CANCELLED, KV_NO_MEMORY. */
KV_API kv_status kv_load(kv_model* model, const char* path,
                         const kv_session_options* session_options, const kv_call_options* options,
                         kv_session** out, kv_error* error);

/* The same of the first `tokens` tokens of the saved sequence alone (0: all), as if no more had been read: pages are shared with the file, whatever the
 * strategy reads ends there. The newest tokens, those that a window keeps in full precision, are read again, at most window and a page of
 * them, with progress (KV_PHASE_PREFILL) and cancel, because the file has them as pages only; kv_load and kv_rewind do without, and they stay as precise
 * as pages are. Where the file's own window has them, and in a full-precision sequence, the session is bit for bit what reading them gives.
 * KV_BAD_ARGUMENT (the file has fewer), KV_CANCELLED, and as kv_load. */
KV_API kv_status kv_load_prefix(kv_model* model, const char* path, uint64_t tokens,
                                const kv_session_options* session_options,
                                const kv_call_options* options, kv_session** out, kv_error* error);

/* What a cache file says of itself. */
typedef struct kv_file_information {
  uint32_t struct_size;    /* in: set by the caller to sizeof */
  uint32_t format_version; /* of docs/file-format.md */
  uint64_t file_bytes;     /* of the whole file */
  uint64_t tokens;         /* of the sequence */
  uint64_t sealed_tokens;  /* the first ones of these, which are in pages */
  uint64_t kv_bytes;       /* pages, scales and summaries */
  uint32_t layers;         /* of the model */
  uint32_t kv_heads;       /* of a layer */
  uint32_t head_dim;       /* elements of a head */
  uint32_t kv_type;        /* kv_kv_type */
  char model_name[64];     /* of the model that read it, cut where it is longer */
  char chat_format[32];    /* of its turns; empty: it has none, or an older library wrote it */
} kv_file_information;

/* What a cache file says of itself; checks the header and the sequence's facts only. A packed document is KV_NOT_A_CACHE: kv_packed_inspect. */
KV_API kv_status kv_file_inspect(const char* path, kv_file_information* info, kv_error* error);

/* Reads and checks every byte. KV_CORRUPT names section and offset. */
KV_API kv_status kv_file_verify(const char* path, const kv_call_options* options, kv_error* error);

/* How a saved sequence is packed. */
typedef struct kv_pack_options {
  uint32_t struct_size;
  uint32_t level;    /* of compression, 1 to 19: slower and a little smaller; 0: 1. kv_unpack: 0 */
  kv_cancel* cancel; /* NULL: cannot be cancelled but by the callback */
  kv_progress_fn progress; /* NULL: none. KV_PHASE_PACK, KV_PHASE_UNPACK */
  void* progress_user;
} kv_pack_options;

/* All defaults; size is sizeof *options. */
KV_API void kv_pack_options_init(kv_pack_options* options, size_t size);

/* Makes a smaller copy of a saved sequence, for sending or keeping away: about 85% of its size. It cannot be loaded before kv_unpack has
 * restored it, bit for bit. Takes less than 10 MiB of memory whatever the file's size. packed_path is replaced atomically, as kv_save does it: after
 * a failure it is as it was. options may be NULL.
 * KV_BAD_ARGUMENT (a level out of its range, both paths lead to one file), KV_NOT_FOUND, KV_NOT_A_CACHE, KV_VERSION, KV_CORRUPT (path's header or
 * tables; its sections are packed as they are: kv_file_verify checks them), KV_CANCELLED, KV_NO_SPACE, KV_PERMISSION, KV_IO, KV_NO_MEMORY. */
KV_API kv_status kv_pack(const char* path, const char* packed_path, const kv_pack_options* options,
                         kv_error* error);

/* Restores at path what kv_pack packed; errors likewise. KV_CORRUPT when anything in the file is not as it was written, KV_NOT_A_CACHE and
 * KV_VERSION also of the document inside, whose header is checked before a file is begun. Never writes more than 4 MiB and 64 times the packed
 * file, and reserves no space on the disk. */
KV_API kv_status kv_unpack(const char* packed_path, const char* path,
                           const kv_pack_options* options, kv_error* error);

/* What a packed document says of itself. */
typedef struct kv_packed_information {
  uint32_t struct_size;    /* in: set by the caller to sizeof */
  uint32_t packed_version; /* of the packed format */
  uint64_t file_bytes;     /* of the packed file */
  uint64_t document_bytes; /* when it is unpacked */
  uint64_t tokens;         /* of the sequence */
  uint32_t format_version; /* of the document */
  uint32_t level;          /* of compression */
  uint32_t layers;         /* of the model */
  uint32_t kv_heads;       /* of a layer */
  uint32_t head_dim;       /* elements of a head */
  uint32_t reserved;       /* 0 */
  char model_name[64];     /* of the model that read it, cut where it is longer */
} kv_packed_information;

/* What a packed document says of itself; checks its header and size only. KV_NOT_A_CACHE when it is something else. */
KV_API kv_status kv_packed_inspect(const char* path, kv_packed_information* info, kv_error* error);

/* ---- library of documents --------------------------------------------------------------------------------------------- */

/* A folder of saved documents that finds by itself what was read before: every text is read once, and of a text that begins like another only
 * the rest. Any number of processes and threads may use one folder at once; a handle may be used by any number of threads. NAME.kv in the
 * folder is the document of that name, an ordinary file of kv_save; files put there are documents like the others. A document that a
 * session has open, in any process, is neither evicted nor removed. A name has 1 to 200 bytes of
 * UTF-8, no slash, no backslash, no control character and no dot at its beginning, and is one that
 * the system allows. Documents are the plain files NAME.kv of such names that begin as a cache
 * does; the functions below know no others. What else is in the folder (other programs' files,
 * symbolic links, packed documents) is not listed, does not count towards max_bytes, and is never
 * evicted, removed, renamed or replaced. The folder and what is put into it are for their owner
 * alone (modes 0700 and 0600). A process that ends at any moment leaves a temporary file at most,
 * which the
 * next kv_library_open removes, and documents that were to go (max_bytes), which go with the next save or kv_library_open under that limit.
 * Each document is whole by itself: what two have in common is on the disk twice. */
typedef struct kv_library kv_library;

/* How a library is kept. */
typedef struct kv_library_options {
  uint32_t struct_size;
  uint32_t flags; /* 0 */
  /* All documents together: for a save and in kv_library_open the least recently used ones go; 0: no limit. They go when what is saved is in its place,
   * durably: a failed save costs none. One that ends in between leaves more than this, until the next save or kv_library_open. */
  uint64_t max_bytes;
  kv_log_fn
      log; /* evictions, documents that cannot be used (of another version: each once a handle); NULL: silent */
  void* log_user;
} kv_library_options;

/* All defaults; size is sizeof *options. */
KV_API void kv_library_options_init(kv_library_options* options, size_t size);

/* Makes the folder where there is none (not those above it). A relative path is resolved now: the
 * current folder may change afterwards. A folder that cannot be written to is read all the same;
 * then nothing is evicted, which the log says, and nothing saved. *out is closed with
 * kv_library_close; sessions stay usable.
 * KV_NOT_FOUND, KV_PERMISSION, KV_IO, KV_BUSY (another process has been changing the library for 10 seconds), KV_NO_MEMORY. */
KV_API kv_status kv_library_open(const char* folder, const kv_library_options* options,
                                 kv_library** out, kv_error* error);
/* The folder stays as it is. */
KV_API void kv_library_close(kv_library* library);

/* A document of a library. */
typedef struct kv_library_document {
  uint32_t struct_size; /* in: set by the caller to sizeof */
  kv_status
      status; /* KV_OK, or why the file cannot be used: KV_CORRUPT, KV_VERSION, KV_NOT_A_CACHE and others; then it has no tokens */
  uint64_t file_bytes; /* on the disk */
  uint64_t tokens;     /* of the sequence */
  uint64_t last_used;  /* nanoseconds since 1970 */
  char name[208];      /* without .kv */
  char model_name[64]; /* of the model that read it, cut where it is longer */
  char fingerprint
      [72]; /* of the model's weights, as kv_model_information has it, in hexadecimal digits */
} kv_library_document;

/* Fills *document, up to the struct_size it came with, for the document of an index, the last used first; KV_NOT_FOUND after the last. Index 0
 * looks at the folder, others go on in what index 0 found last: one thread at a time lists. KV_IO, KV_PERMISSION, KV_NOT_FOUND with sys_errno (the folder
 * is gone), KV_NO_MEMORY. A file that cannot be read is listed with its status; it neither counts
 * towards max_bytes nor is it evicted. */
KV_API kv_status kv_library_list(kv_library* library, uint32_t index, kv_library_document* document,
                                 kv_error* error);

/* How a text is looked up, read and saved. */
typedef struct kv_library_session_options {
  uint32_t struct_size;
  uint32_t flags;                    /* KV_TOKENIZE_SPECIAL, KV_LIBRARY_* */
  const char* name;                  /* of the document that is saved; NULL: a hash */
  const kv_session_options* session; /* as for kv_session_open; NULL: the defaults */
  kv_cancel* cancel;                 /* NULL: cannot be cancelled but by the callback */
  kv_progress_fn
      progress; /* KV_PHASE_VERIFY, KV_PHASE_PREFILL, KV_PHASE_PREPARE, KV_PHASE_SAVE; NULL: none */
  void* progress_user;
} kv_library_session_options;

#define KV_LIBRARY_VERIFY \
  16u /* check all of a document before it is used, not each part when it is first used */
#define KV_LIBRARY_REPLACE 64u /* replace the document that has the name, whatever it holds */

/* All defaults; size is sizeof *options. */
KV_API void kv_library_session_options_init(kv_library_session_options* options, size_t size);

/* Where the session of a text came from. */
typedef struct kv_library_result {
  uint32_t struct_size; /* in: set by the caller to sizeof */
  kv_status
      save_status; /* KV_OK, or why what was read is not in the library though the session is there */
  uint64_t tokens;       /* of the text */
  uint64_t tokens_found; /* the first ones of these, that a document had */
  uint32_t
      saved; /* 1: what was read is now in the library; 0: it was there, or save_status says why not */
  char name[212]; /* of the document that was found, or saved */
} kv_library_result;

/* A session that has read the text as kv_prefill reads it. The document that has most of its tokens at its beginning, read by the same model
 * with the same chat format, window, kv_type and prefill_strategy (its budget and exact tokens too), is mapped as by kv_load_prefix; the rest is read and the
 * result saved. Where all is found nothing is saved, also when the document goes on. A document that is found damaged is passed over, and its place
 * taken by what is read where its name or none is given and the text has all of it, or begins it.
 * result may be NULL. Costs a look at the header of each document, besides. Where the new document
 * cannot fit none goes for it, KV_NO_SPACE in save_status; nor does an older one of its name. A
 * name that is taken, by a document or by any other file, is made unique: a dash and 8 hexadecimal
 * digits, made from the text and the model, follow it; result->name has the whole. So two texts, or
 * two models that read one text, may be given one name. With KV_LIBRARY_REPLACE the document that
 * has the name is replaced, whatever it holds and whichever model read it. A text that another call has saved meanwhile is not saved twice:
 * result->saved is 0 and save_status KV_OK.
 * Where only the save meets the damage of the document that was found, the text is read a second time, without that document, while the first session
 * is kept: memory for both. Should the second reading fail or be cancelled, *out is the first session, with KV_CORRUPT in save_status: it answers as
 * one of kv_load does over a file with damage, which it meets where it uses it (KV_CORRUPT).
 * KV_BAD_ARGUMENT (also an empty text), KV_CANCELLED
 * (nothing was saved; what was read is lost), KV_CONTEXT_FULL, KV_NO_MEMORY, KV_IO. A failure to
 * save, or a cancel while saving, is not a failure of this call: result->save_status. */
KV_API kv_status kv_library_session(kv_library* library, kv_model* model, const char* text,
                                    size_t size, const kv_library_session_options* options,
                                    kv_session** out, kv_library_result* result, kv_error* error);

/* Durable when it returns KV_OK. KV_NOT_FOUND (no document, though perhaps another file, has the
 * name), KV_BAD_STATE (a document or a file has the new name), KV_BUSY as kv_library_open. */
KV_API kv_status kv_library_rename(kv_library* library, const char* from, const char* to,
                                   kv_error* error);
/* Durable when it returns KV_OK. KV_NOT_FOUND (as kv_library_rename), KV_BUSY (a session has it
 * mapped, or as kv_library_open; the session that has read and saved it has it in
 * memory and goes on). */
KV_API kv_status kv_library_remove(kv_library* library, const char* name, kv_error* error);

/* ---- the store without a model -------------------------------------------------------------------------------------- */

/* Keys and values of one sequence for an engine that brings its own weights: the same int8 pages behind a full-precision window, the same
 * strategies and the same file as a session's. One call at a time, from any thread; a second concurrent one gets KV_BUSY.
 *
 *     for each step of 1 to 4096 tokens (a chunk of the prompt, or one token of the answer):
 *       for each layer:
 *         kv_cache_update(c, layer, KV_F16, k, v, NULL, tokens, &err);                keys after RoPE
 *         kv_cache_attention(c, layer, KV_F16, q, out, tokens, NULL, &err);           causal, over all tokens so far
 *
 * Arrays are contiguous rows: k, v [tokens][kv_heads][head_dim], q and out [tokens][heads][head_dim], of any alignment. Query heads
 * h * heads / kv_heads to (h + 1) * heads / kv_heads - 1 belong to key/value head h. */
typedef struct kv_cache kv_cache;

/* The heads and the length of a cache without a model. */
typedef struct kv_cache_shape {
  uint32_t struct_size; /* in: set by the caller to sizeof */
  uint32_t layers;      /* 1 to 1024 */
  uint32_t heads;       /* query heads, 1 to 1024 */
  uint32_t kv_heads;    /* a divisor of heads */
  uint32_t head_dim;    /* 1 to 256 */
  uint32_t reserved;    /* 0 */
  uint64_t max_tokens;  /* that the sequence may hold, 1 to 2^30; memory is taken as it grows */
  uint8_t identity
      [32]; /* the caller's name for what makes the keys, such as a hash of its weights; kv_cache_load compares it */
} kv_cache_shape;

/* How a cache without a model is kept and attended. */
typedef struct kv_cache_options {
  uint32_t struct_size;
  uint32_t threads;      /* as in kv_session_options, and so are those of the same names below */
  uint32_t kv_type;      /* as in kv_session_options */
  uint32_t window;       /* as in kv_session_options */
  uint32_t dense_layers; /* the first ones: nothing measures which are served worst */
  uint32_t share_heads;  /* as in kv_session_options */
  /* What a step of one token reads; longer ones are exact. NULL or "auto", "full", "window", "quest", "flat", "dipr", "bounded", "filter-layers"
   * (each filter layer is then attended before the layers up to the next one, which get KV_BAD_STATE otherwise) or "infllm" (which needs the q
   * of every update). Others need a model: KV_BAD_ARGUMENT. */
  const char* strategy;
  uint64_t budget_tokens;    /* as in kv_session_options */
  double budget_fraction;    /* as in kv_session_options */
  const char* filter_layers; /* as in kv_session_options */
  float alpha;               /* as in kv_session_options */
  float coverage;            /* as in kv_session_options */
  uint32_t select_tokens;    /* as in kv_session_options */
  uint32_t reserved;         /* 0 */
  /* As in kv_session_options; the largest step so far is the step of which it has to hold the window and the pages. A step for which it is too small is
   * refused before anything of it is taken: kv_cache_update. The caller's arrays and workspace of about a step's q, k and v are not counted. */
  uint64_t memory_budget;
  const char* spill_folder; /* as in kv_session_options */
} kv_cache_options;

/* All defaults; size is sizeof *options. */
KV_API void kv_cache_options_init(kv_cache_options* options, size_t size);

/* Of the numbers in the caller's arrays. */
typedef enum kv_number_type { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2 } kv_number_type;

/* An empty cache. *out is closed with kv_cache_close. KV_BAD_ARGUMENT (a shape or option out of its range), KV_NO_MEMORY, KV_LIMIT (threads;
 * memory_budget); KV_NOT_FOUND, KV_PERMISSION, KV_NO_SPACE (spill_folder). */
KV_API kv_status kv_cache_open(const kv_cache_shape* shape, const kv_cache_options* options,
                               kv_cache** out, kv_error* error);
/* Ends the sequence; what it shares with forks stays with them. */
KV_API void kv_cache_close(kv_cache* cache);

/* One layer's keys (after RoPE) and values of the step's tokens. The first update after a complete step begins a step, which is complete when
 * every layer has had its update; the order of layers is free. q (may be NULL): the step's queries after RoPE, for the strategy "infllm".
 * Time is linear in tokens; a step's first update also completes the step before it. No cancel: a
 * step of 512 tokens takes less than 100 ms.
 * KV_BAD_ARGUMENT (layer, tokens; a number that is not finite), KV_BAD_STATE (the layer has been updated; another number of tokens than the
 * step has), KV_CONTEXT_FULL, KV_LIMIT (memory_budget: the message says the least), KV_BUSY: the cache is as it was. KV_NO_MEMORY, KV_CORRUPT (a
 * damaged page of a mapped file), KV_NO_SPACE, KV_IO (pages could not be written to the spill_folder): likewise, but an update that was to begin a step
 * may have ended the attention of the complete one. */
KV_API kv_status kv_cache_update(kv_cache* cache, uint32_t layer, uint32_t type, const void* k,
                                 const void* v, const void* q, uint32_t tokens, kv_error* error);

/* How a step is attended. */
typedef struct kv_cache_attention_options {
  uint32_t struct_size;
  uint32_t flags; /* 0 */
  float scale;    /* of q . k; 0: 1 / sqrt(head_dim) */
  float
      softcap; /* scores become softcap * tanh(score / softcap), in plain code, which is slower; strategies choose by the scores
                             * before that; 0: as they are */
  kv_cancel* cancel; /* NULL: cannot be cancelled */
} kv_cache_attention_options;

/* All defaults; size is sizeof *options. */
KV_API void kv_cache_attention_options_init(kv_cache_attention_options* options, size_t size);

/* Attention of the step's queries in one layer: query i sees the tokens before the step and those of the step up to its own. The layer has had its
 * update in this step; tokens is the step's. A complete step can be attended until another begins, or kv_cache_truncate, kv_cache_fork or
 * kv_cache_save is called. What is still in the window is exact but for rounding; pages are int8. options may be NULL.
 * "bounded", and "auto" from 4096 sealed tokens on, choose by a sketch of the keys. The first
 * attention of a step of one token finds it where there is none or the sealed tokens have doubled,
 * which reads all pages. kv_cache_save and kv_cache_fork do so too, so that a cache that was loaded
 * with the strategy it was saved with, or copied, need not. Where that is cancelled, the next call
 * finds it.
 * KV_BAD_ARGUMENT, KV_BAD_STATE (the layer has no update in this step; the step is over; the filter layer before it has not been attended),
 * KV_CANCELLED, KV_NO_MEMORY, KV_CORRUPT (a damaged page of a mapped file), KV_IO (a page of a file could not be read), KV_BUSY: the cache is as it was
 * and out unchanged. */
KV_API kv_status kv_cache_attention(kv_cache* cache, uint32_t layer, uint32_t type, const void* q,
                                    void* out, uint32_t tokens,
                                    const kv_cache_attention_options* options, kv_error* error);

/* Goes back to the first `tokens` tokens, and drops a step that is not complete; with the number of complete tokens it does only that. Tokens
 * that had left the window come back with the precision of their pages, but none has left it for a step that can still be attended.
 * Time as kv_rewind.
 * KV_BAD_ARGUMENT (there are fewer), KV_CORRUPT (a damaged page of a mapped file), KV_NO_MEMORY, KV_BUSY: the cache is as it was. */
KV_API kv_status kv_cache_truncate(kv_cache* cache, uint64_t tokens, kv_error* error);

/* A second cache that begins as an exact copy, pages shared, with the same options; a memory_budget
 * is for each. cancel: for a sketch that has to be found first (kv_cache_attention); NULL: none.
 * KV_BAD_STATE while a step is not complete; KV_CANCELLED, KV_NO_MEMORY, KV_CORRUPT (a damaged page
 * of a mapped file, where a sketch has to be found), KV_BUSY. */
KV_API kv_status kv_cache_fork(kv_cache* cache, kv_cancel* cancel, kv_cache** out, kv_error* error);

/* Writes the cache to a file, atomically, as kv_save does. KV_BAD_STATE while a step is not complete; otherwise errors of kv_save. kv_file_inspect,
 * kv_file_verify, kv_pack and kv_unpack take it like any other. */
KV_API kv_status kv_cache_save(kv_cache* cache, const char* path, const kv_call_options* options,
                               kv_error* error);

/* A new cache over a saved one, mapped. Its shape is the one asked for, or KV_MODEL_MISMATCH, as with another identity; heads are not compared, as
 * keys and values do not depend on them and a file does not know them. A session's file is refused likewise, and kv_load refuses a cache's: nothing
 * would say that the keys are of the same weights. window and kv_type are the file's: one in full precision is refused with a memory_budget
 * (KV_BAD_ARGUMENT). Otherwise errors of kv_load. options->flags: KV_LOAD_VERIFY. */
KV_API kv_status kv_cache_load(const kv_cache_shape* shape, const char* path,
                               const kv_cache_options* cache_options,
                               const kv_call_options* options, kv_cache** out, kv_error* error);

#define KV_CACHE_UNCHECKED 32u /* kv_session_from_cache does not compare; see there */

/* A session over what is in the cache: a document that another engine has read, also on other machines (kv_cache_save, kv_cache_load), is asked by
 * the model at home, and saved by kv_save like any other. tokens: the cache's, from the first on; count: as many as it holds. options->flags:
 * KV_TOKENIZE_DOCUMENT, where they are what kv_tokenize made with it, so that questions get the chat format's turns; otherwise the session is as
 * after kv_prefill_tokens. Keys are those of the model's own file: after RoPE, with the file's order of channels, in which files of the
 * architecture "llama" interleave the two halves that engines of other formats rotate (channel i of half h is channel 2 i + h).
 * Pages are shared with the cache, which stays as it is. What is not sealed, at most window and a page of tokens, is read again by the model, with
 * progress (KV_PHASE_PREFILL) and cancel: what strategies learn from reading comes from there. It is compared with what the cache has: weights of
 * another precision pass, keys of another model, of other positions or in another order do not (KV_MODEL_MISMATCH). With KV_CACHE_UNCHECKED
 * it is not compared, so that keys and values may be made up, to measure with: nothing tells such a session, or its file, from one of a text. window and kv_type are the cache's.
 * KV_BAD_ARGUMENT (count), KV_BAD_STATE (a step is not complete), KV_MODEL_MISMATCH, KV_CONTEXT_FULL, KV_CANCELLED, KV_LIMIT (memory_budget), KV_CORRUPT
 * (a damaged page of a mapped file), KV_NO_MEMORY, KV_BUSY: the cache is as it was. */
KV_API kv_status kv_session_from_cache(kv_model* model, kv_cache* cache, const int32_t* tokens,
                                       size_t count, const kv_session_options* session_options,
                                       const kv_call_options* options, kv_session** out,
                                       kv_error* error);

/* JSON, as kv_stats: tokens (of complete steps), sealed_pages, window_tokens, step_tokens, private_bytes, mapped_bytes, spilled_bytes, memory_budget,
 * strategy_planned, budget_tokens, tokens_read and tokens_present of all attention so far, and more. */
KV_API kv_status kv_cache_stats(kv_cache* cache, char* json, size_t capacity, size_t* size,
                                kv_error* error);

#ifdef __cplusplus
}
#endif
#endif /* KVASIR_H */
