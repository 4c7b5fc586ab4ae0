/* Kvasir: prefill a long document once, save its KV cache, and query it any number of times.
 *
 *   #include <kvasir.h>
 *   #include <stdio.h>
 *   #include <string.h>
 *
 *   static int32_t print(const char *text, size_t size, void *user) {
 *     return fwrite(text, 1, size, (FILE *)user) < size;          (non-zero stops the answer)
 *   }
 *
 *   int main(void) {
 *     const char *book = "The gate's code is 4711.", *question = "What is the gate's code?";
 *     kv_error e;
 *     kv_model *model = NULL;
 *     kv_session *session = NULL;
 *     int failed = kv_open("model.gguf", NULL, NULL, &model, &e) ||
 *                  kv_session_open(model, NULL, &session, &e) ||
 *                  kv_prefill(session, book, strlen(book), NULL, NULL, NULL, &e) ||
 *                  kv_save(session, "book.kv", NULL, &e) ||
 *                  kv_generate(session, question, strlen(question), NULL, NULL, print, stdout,
 *                              NULL, &e);
 *     if (failed) fprintf(stderr, "%s\n", e.message);
 *     kv_session_close(session);
 *     kv_close(model);
 *     return failed;
 *   }
 *
 * The next run maps the saved file instead. One call replaces kv_session_open, kv_prefill and
 * kv_save, and milliseconds replace the minutes that prefill of a book takes:
 *
 *     kv_load(model, "book.kv", NULL, NULL, &session, &e)
 *
 * Contents: 1 Status  2 Simple API  3 Options  4 Models and sessions  5 Files  6 Library  7 GPU
 *           8 Strategies  9 External engines.  Terms: docs/glossary.md
 *
 * Rules for every function. An entry names its exceptions.
 *  - A function returns a kv_status; KV_OK is 0. After a failure the outputs and the handle are
 *    unchanged.
 *  - The caller owns the kv_error. The library writes it on failure only. NULL is allowed.
 *  - A text is a pointer and a size in bytes, UTF-8, not terminated; NULL is allowed with size 0.
 *    Bytes that are not UTF-8 are tokenized as bytes. Paths and names are NUL-terminated UTF-8.
 *  - NULL for an options struct or a kv_control means all defaults.
 *  - A kv_model and a kv_library serve any number of threads. A kv_session and a kv_cache serve
 *    one call at a time, from any thread; a second concurrent call gets KV_BUSY.
 *  - Section 3 has the rules about structs, callbacks, handles and the process.
 */
#ifndef KVASIR_H
#define KVASIR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32) && defined(KVASIR_EXPORTS) /* defined while the library itself is built */
#define KV_API __declspec(dllexport)
#elif defined(__GNUC__) && !defined(_WIN32)
#define KV_API __attribute__((visibility("default")))
#else
#define KV_API
#endif

/* ==== 1 Status ================================================================================ */

/* Status code returned by every function. Numbers never change; new ones may be added. */
typedef int32_t kv_status;
enum {
  KV_OK = 0,
  KV_CANCELLED = 1,    /* a cancel token fired or a callback returned non-zero */
  KV_BAD_ARGUMENT = 2, /* NULL, a wrong struct_size, or a value out of range */
  KV_BUSY = 3,         /* another call on this handle is running */
  KV_BAD_STATE = 4,    /* an earlier call rules this one out; message names a valid one */
  KV_NO_MEMORY = 5,
  KV_LIMIT = 6,    /* a limit of the system or the options: open files, threads, sizes */
  KV_IO = 7,       /* a read or write failed; sys_errno has the cause */
  KV_NO_SPACE = 8, /* disk full, quota, or file size limit */
  KV_NOT_FOUND = 9,
  KV_PERMISSION = 10,
  KV_NOT_A_CACHE = 11,    /* the file is not a cache file */
  KV_VERSION = 12,        /* a newer library wrote the file: stale */
  KV_CORRUPT = 13,        /* damaged data; offset has the place */
  KV_MODEL_MISMATCH = 14, /* the file has another model, chat format, instructions or documents:
                           * stale */
  KV_UNSUPPORTED = 15,    /* a valid file, but this library lacks a feature; message names it */
  KV_CONTEXT_FULL = 16,   /* the context length of the model or of the session is reached */
  KV_INTERNAL = 17,       /* a bug in Kvasir */
  KV_DEVICE = 18          /* a GPU failed; every call on its model may return it: section 7 */
};

/* Filled by a failing call. `message` is one line. It names the subject and what is unchanged. It
 * is printable UTF-8: other bytes and characters of a file or a path are written as "\x0A" and
 * "\u{202E}". */
typedef struct kv_error {
  kv_status status;  /* the returned status */
  int32_t sys_errno; /* 0: none */
  uint64_t offset;   /* bytes from the start of a file; UINT64_MAX: none */
  char message[384]; /* English, always terminated */
} kv_error;

/* ==== 2 Simple API ============================================================================ */

typedef struct kv_model kv_model;     /* weights (a mapped GGUF file), tokenizer and chat format;
                                       * immutable, reference-counted */
typedef struct kv_session kv_session; /* a sequence of tokens and its KV cache */

typedef struct kv_model_options kv_model_options; /* section 3 defines these structs */
typedef struct kv_session_options kv_session_options;
typedef struct kv_generate_options kv_generate_options;
typedef struct kv_control kv_control; /* cancel token, progress and flags of one call */
typedef struct kv_answer kv_answer;

/* Receives whole UTF-8 characters of an answer as decode produces them. `text` is valid during
 * the call. Non-zero stops the answer: KV_CANCELLED. */
typedef int32_t (*kv_text_fn)(const char* text, size_t size, void* user);

/* Maps a GGUF file and checks all of its metadata and tensor shapes. Pages of weights are read
 * when they are used. The file must not change while the model is open. The caller closes *out
 * with kv_close.
 * KV_NOT_FOUND, KV_PERMISSION, KV_IO, KV_NO_MEMORY, KV_CANCELLED, KV_DEVICE; KV_CORRUPT (damaged,
 * contradictory, or with a hole in place of weights); KV_UNSUPPORTED (not a GGUF file, or an
 * architecture, weight type, tokenizer or feature that message names); KV_LIMIT (open files, or too
 * many or too long keys, tensors or tokens, which message names; docs/models.md has the limits).
 * Section 7 has the codes of GPUs.
 * With KV_VOCABULARY_ONLY the call reads no weights. The architecture need not be supported, and
 * the file may have no tensors. The model then serves kv_model_get_info, kv_tokenize and
 * kv_detokenize. Other calls return KV_BAD_STATE. */
KV_API kv_status kv_open(const char* path, const kv_model_options* options,
                         const kv_control* control, kv_model** out, kv_error* error);

/* Decrements the reference count. Each session holds a reference too. The file is unmapped when the
 * count is 0. */
KV_API void kv_close(kv_model* model);

/* Creates a session with an empty sequence. The caller closes *out with kv_session_close.
 * KV_BAD_ARGUMENT (an option out of range, a parameter that does not fit), KV_NO_MEMORY, KV_LIMIT;
 * with a memory_limit also KV_NOT_FOUND, KV_PERMISSION, KV_NO_SPACE (spill_directory). */
KV_API kv_status kv_session_open(kv_model* model, const kv_session_options* options,
                                 kv_session** out, kv_error* error);

/* Destroys the session. Forks keep the pages that they share with it. */
KV_API void kv_session_close(kv_session* session);

/* Appends document text to the sequence, inside a turn of the chat format. Several calls continue
 * one document. Attention is exact unless the session has a prefill strategy.
 * After a failure the complete steps stay: chunks, or spans of up to 65,536 tokens and a chunk
 * where memory cannot hold the model. A turn that has no text yet is removed. *tokens_done receives
 * the number of appended tokens, *bytes_done the byte of `text` where they end. Both are written in
 * every case and may be NULL. A later call with the rest of the text continues there. If
 * a word begins at that byte, the tokens equal those of one call. Otherwise the tokens may differ,
 * but they spell the same text. After the last token the call builds the sketch of "bounded". A
 * cancel during this build returns KV_OK, because the whole text was appended. The next call that
 * needs the sketch builds the same one.
 * control->flags: KV_TOKENIZE_SPECIAL. Progress: KV_PHASE_PREFILL.
 * KV_CANCELLED, KV_CONTEXT_FULL (nothing was appended), KV_BAD_STATE (a conversation has begun),
 * KV_NO_MEMORY, KV_BUSY; KV_CORRUPT (a damaged page of a mapped file, or weights that yield NaN or
 * infinity: the chunk was not appended); with a memory_limit KV_LIMIT, KV_NO_SPACE, KV_IO. */
KV_API kv_status kv_prefill(kv_session* session, const char* text, size_t size,
                            const kv_control* control, uint64_t* tokens_done, uint64_t* bytes_done,
                            kv_error* error);

/* Appends the question as a turn of the chat format and decodes the answer into on_text, which may
 * be NULL. Afterwards the sequence is exactly as before, unless options->flags has KV_KEEP_TURN.
 * With that flag a stopped or failed call keeps the tokens decoded so far. The last token may be
 * missing even if on_text received it. `answer` may be NULL. The call fills it on KV_OK and
 * KV_CANCELLED.
 * A thought is no part of the answer. A kept turn has none either, unless flags has
 * KV_KEEP_THINKING: the call then appends the turn again, as if the model had not thought. If it
 * fails, or the cancel token is fired, in a turn with a thought, the sequence is as before.
 * Progress: KV_PHASE_PREPARE, then KV_PHASE_PREFILL of the question.
 * KV_CANCELLED, KV_CONTEXT_FULL (the question does not fit), KV_BAD_STATE (sequence and question
 * are both empty), KV_UNSUPPORTED (thinking), KV_NO_MEMORY, KV_BUSY; KV_LIMIT (the memory_limit
 * has no room for the question or for the strategy's index; the sequence is as before); KV_CORRUPT
 * (a damaged page of a mapped file). */
KV_API kv_status kv_generate(kv_session* session, const char* question, size_t size,
                             const kv_generate_options* options, const kv_control* control,
                             kv_text_fn on_text, void* user, kv_answer* answer, kv_error* error);

/* Writes the sequence to a cache file, atomically and durably. After any failure, also a power
 * failure, `path` holds either the old file or the complete new one.
 * The call first builds or updates the strategy's sketch and index, as kv_session_prepare does.
 * Where the memory_limit has no room for an index, it saves the one that exists, or none, and logs
 * a warning. The last part, which syncs and renames the file, cannot be cancelled.
 * Only its owner can access a new file (mode 0600, less the umask). A replaced file keeps its mode
 * and access list, and its owner and group where the process may set them. The call follows a
 * symbolic link. A dangling link is KV_BAD_ARGUMENT. A link of another user is KV_PERMISSION,
 * unless root or the folder's owner made it. docs/memory-and-files.md has the rules for groups and
 * for Windows.
 * Progress: KV_PHASE_PREPARE, then KV_PHASE_SAVE.
 * KV_NO_SPACE, KV_PERMISSION, KV_IO, KV_CANCELLED, KV_BAD_ARGUMENT, KV_NO_MEMORY, KV_BUSY;
 * KV_CORRUPT (damaged pages of a loaded file, or NaN or infinity made from them: the new file could
 * not be loaded). After each of these codes the old file stays. */
KV_API kv_status kv_save(kv_session* session, const char* path, const kv_control* control,
                         kv_error* error);

/* Creates a session from a cache file by mapping it. Header and tables are verified now, each page
 * at its first use. control->flags KV_VERIFY verifies everything now (progress: KV_PHASE_VERIFY).
 * The file may be replaced or unlinked afterwards. It must not be truncated or written in place.
 * Precision, window_tokens and chat format of the file override those of options and model. For an
 * older library's file without a chat format, the call uses the model's. The caller closes *out
 * with kv_session_close.
 * KV_NOT_FOUND, KV_NOT_A_CACHE, KV_VERSION (stale), KV_CORRUPT, KV_CONTEXT_FULL, KV_LIMIT
 * (memory_limit), KV_CANCELLED, KV_IO, KV_PERMISSION, KV_NO_MEMORY, and the codes of
 * kv_session_open; KV_MODEL_MISMATCH (stale: other weights, other instructions, another
 * kv_model_options.chat_format, or an unknown one); KV_BAD_ARGUMENT (a full-precision file with a
 * memory_limit).
 * Of a session of kv_session_compose the call maps the documents too, and returns its codes.
 * KV_NOT_FOUND (a document is missing) and KV_MODEL_MISMATCH (a document has changed) name it.
 * KV_VERIFY verifies one file after the other. */
KV_API kv_status kv_load(kv_model* model, const char* path, const kv_session_options* options,
                         const kv_control* control, kv_session** out, kv_error* error);

/* ==== 3 Options ===============================================================================
 *
 * Structs. Initialise every struct that begins with struct_size, options and results alike:
 *
 *     kv_session_options o;
 *     kv_init(&o, sizeof o);          clears it and sets struct_size; 0 is each field's default
 *     o.memory_limit = (uint64_t)4 << 30;
 *
 * A library accepts a shorter struct of an older header: the absent fields have their defaults. It
 * accepts a longer struct of a newer header if all additional bytes are 0. Otherwise it returns
 * KV_BAD_ARGUMENT. It fills a result struct up to its struct_size. Structs of version 0.1 have
 * other fields: KV_BAD_ARGUMENT.
 * `reserved` fields and unknown bits of `flags` must be 0: KV_BAD_ARGUMENT.
 *
 * Callbacks run on the calling thread and never after the call has returned. 0 continues the call.
 * Non-zero stops it with KV_CANCELLED. A call on the callback's own handle returns KV_BUSY. A C++
 * exception stops the call too; message has the callback's name and the exception's text. A
 * callback must not longjmp out of the call. kv_log_fn has its own rules.
 *
 * Handles. Children retain their parents, so handles may be closed in any order. Closing NULL does
 * nothing. A handle must not be closed during a call on it. A session or kv_cache and its forks
 * share one team of threads, and may be called at the same time.
 *
 * Process. The library never ends the process, throws, prints or installs a signal handler. It
 * needs no global initialisation. After the last handle is closed it holds no thread and no memory.
 *  - Stack: a call uses less than 32 KiB of the caller's stack, without callbacks and GPUs.
 *  - Floating point: rounding, traps and flush-to-zero of the host change no result. A call
 *    restores the host's environment before each callback and before it returns.
 *  - Locale: not used. JSON and messages have a decimal point.
 *  - Signals: the library's threads block all but faults and SIGPROF. A handler may call
 *    kv_cancel_fire and nothing else.
 *  - pthread_cancel takes effect in a callback or after the call. A callback may call pthread_exit.
 *    Both leave the handle as a stop in that callback does, usable from another thread.
 *  - fork: a child must neither use nor close its parent's handles; it may exec. exec closes all
 *    descriptors of the library.
 *  - dlclose: close all handles first. The library stays mapped until the process ends.
 * docs/embedding.md explains these rules and has more about threads and shipping.
 */

/* Clears `size` bytes at `s` and sets struct_size, its first field, to `size`. Does nothing if
 * `s` is NULL or `size` is under 4. Any thread. */
KV_API void kv_init(void* s, size_t size);

/* Flags. A bit has one meaning everywhere. A function accepts only the flags that its entry names,
 * and reports progress only if its entry says so. */
#define KV_TOKENIZE_SPECIAL 0x01u  /* text that spells a control token becomes that token */
#define KV_TOKENIZE_BOS 0x02u      /* begin with the begin-of-text token if the model uses one */
#define KV_TOKENIZE_DOCUMENT 0x04u /* begin as kv_prefill begins a document without instructions */
#define KV_VOCABULARY_ONLY 0x08u   /* kv_open: only tokenizer and chat format, no weights */
#define KV_VERIFY 0x10u            /* verify the whole file now, not each page at its first use */
#define KV_REPLACE 0x40u           /* kv_library_session: replace a document of the same name */
#define KV_KEEP_TURN 0x100u        /* kv_generate: question and answer stay in the sequence */
/* kv_generate: record the passages of kv_session_passages. The answer is the same but slower: the
 * call scores attended tokens a second time, and the CPU attends all layers. */
#define KV_TRACE_PASSAGES 0x200u
#define KV_KEEP_THINKING 0x400u /* kv_generate: with KV_KEEP_TURN, the thought stays too */
/* kv_open: GPUs leave room for the MTP layer, if the model has one, for sessions with draft_tokens.
 * Fewer of the model's own weights may fit. */
#define KV_PLAN_DRAFTS 0x800u
/* kv_session_options: no drafts by lookup. Otherwise kv_generate drafts up to 15 tokens for a step:
 * those that followed the newest tokens where these occurred before, in the document, a question or
 * an answer. Answers are the same, bit for bit, as with draft_tokens. The session measures what
 * drafts take and how many are accepted. Where they do not pay, steps with drafts and scans of the
 * text take about a hundredth of the time each. With layers on a GPU a step has up to 7. A session
 * of kv_session_compose looks up its questions and answers alone. */
#define KV_NO_LOOKUP 0x1000u

/* -- Cancel and progress -- */

/* Cancel token. A call that has a fired token returns KV_CANCELLED within 100 ms of CPU time,
 * summed over its threads. If its work is complete by then, it returns KV_OK. A token does not
 * interrupt waits: for a disk (fsync, a page), for a GPU driver that opens a device, for another
 * process (kv_library_open, kv_library_rename, kv_library_remove).
 * Every call that can take longer than 100 ms accepts a token, except where its entry says
 * otherwise. */
typedef struct kv_cancel kv_cancel;

/* Creates a token. The caller releases *out when no call uses it any more. KV_NO_MEMORY. */
KV_API kv_status kv_cancel_create(kv_cancel** out, kv_error* error);
/* Fires the token. Any thread or a signal handler, any number of times. NULL does nothing. */
KV_API void kv_cancel_fire(kv_cancel* cancel);
/* Makes a fired token usable again. A call that has already met the fired token stays cancelled. */
KV_API void kv_cancel_reset(kv_cancel* cancel);
/* Destroys the token. NULL does nothing. */
KV_API void kv_cancel_release(kv_cancel* cancel);

/* Phase of a call, and the unit of done and total. */
typedef enum kv_phase {
  KV_PHASE_OPEN = 1,    /* never reported by this version */
  KV_PHASE_PREFILL = 2, /* tokens */
  KV_PHASE_SAVE = 3,    /* bytes written */
  KV_PHASE_VERIFY = 4,  /* bytes verified */
  KV_PHASE_PREPARE = 5, /* steps of building the strategy's sketch, index or representatives */
  KV_PHASE_PACK = 6,    /* bytes of the document packed */
  KV_PHASE_UNPACK = 7   /* bytes of the document restored */
} kv_phase;

/* Reports progress at most ten times a second and once at the end. total is 0 while unknown.
 * Non-zero stops the call: KV_CANCELLED. */
typedef int32_t (*kv_progress_fn)(int32_t phase, uint64_t done, uint64_t total, void* user);

/* Control of one long call. The library uses it during that call only. */
struct kv_control {
  uint32_t struct_size;
  uint32_t flags;          /* those that the function names */
  kv_cancel* cancel;       /* NULL: only a callback can stop the call */
  kv_progress_fn progress; /* NULL: none */
  void* user;              /* passed to progress */
};

/* -- Log -- */

/* Importance of a line of the log. */
typedef enum kv_log_level { KV_LOG_WARNING = 1, KV_LOG_INFO = 2 } kv_log_level;

/* Receives one line without a newline, valid during the call. Any thread that calls the library may
 * call it, several at once. It must stay valid until all handles are closed that use it: the one
 * opened with it, its forks, and sessions of its library. Its exceptions are dropped. */
typedef void (*kv_log_fn)(int32_t level, const char* message, void* user);

/* -- Option structs -- */

/* Options of kv_open. The library copies them.
 *
 * Chat formats: "raw" "chatml" "llama3" "llama2" "llama4" "mistral" "mistral-v3" "mistral-tekken"
 * "mistral-v7" "mistral-v7-spm" "gemma" "gemma4" "phi" "phi4" "phi4-mini" "deepseek" "deepseek-v2"
 * "zephyr" "gpt-oss" "gpt-oss-low" "gpt-oss-high" "granite" "command-r" "command-r7b" "glm4"
 * "exaone4" "seed-oss" "hunyuan-dense" "bailing2" "dots1" "falcon3" "minicpm".
 *
 * A custom format is one conversation with placeholders, at most 16,384 bytes:
 *
 *     "<|system|>{document}<|end|>{user}<|user|>{question}<|end|><|bot|>{answer}<|end|>"
 *
 * {document}, {question} and {answer} stand in this order. The text from {user} to the end repeats
 * for each question, and begins a sequence without a document. Without {user}, the document begins
 * the first user turn: later turns repeat all but the document and the text between it and the
 * question. Text of special tokens becomes these tokens. A cache file keeps a custom format.
 * {thought} may stand between {question} and {answer}, as in "...<think>{thought}</think>{answer}".
 */
struct kv_model_options {
  uint32_t struct_size;
  uint32_t flags;          /* KV_VOCABULARY_ONLY or KV_PLAN_DRAFTS */
  kv_log_fn log;           /* NULL: silent */
  void* log_user;          /* passed to log */
  const char* chat_format; /* NULL: recognised from the file's template, which is never executed.
                            * Or a name of docs/models.md, such as "chatml", or a custom format.
                            * kv_load then refuses a file of another format */
  const char* device;      /* NULL, "cpu", "auto", "cuda", "cuda:1", "cuda:0,cuda:1" or "cuda:all":
                            * section 7 */
  uint64_t device_memory;  /* bytes of GPU memory per entry in `device`; 0: all free memory */
  /* Directory for hashes of whole model files. NULL: no hash. The call creates a missing directory,
   * but not its parents. A background thread of low priority reads the file once, uses at most a
   * quarter of a CPU core, and ends with the model. Later calls of kv_open find the hash of the
   * unchanged file there. A directory without write permission is no error: each call then computes
   * the hash again. Models and processes may share one directory. */
  const char* hash_directory;
};

/* How the KV cache is stored. */
typedef enum kv_precision {
  KV_PRECISION_INT8 = 0, /* int8 pages behind a full-precision window */
  KV_PRECISION_F32 = 1   /* float32 throughout, full attention: the reference, 7 times the memory */
} kv_precision;

typedef struct kv_strategy kv_strategy; /* which pages attention reads: section 8 */

/* Options of a session. The library copies them, strings and strategies included. */
struct kv_session_options {
  uint32_t struct_size;
  uint32_t threads;        /* including the caller's; 0: one per CPU of the process */
  uint64_t context_tokens; /* maximum length, up to the model's; 0: the model's */
  uint32_t window_tokens;  /* newest tokens in full precision, always attended; 0: 64 */
  /* Tokens per prefill step, 1 to 4096. 0: 512, on a GPU or with many experts 1024. 2048 on a GPU
   * with 32 GiB or more for the library, and on one with 64 multiprocessors or more that has no
   * room for all weights. Of several GPUs the fewest. Fewer to bound memory. */
  uint32_t prefill_chunk;
  uint32_t precision;         /* kv_precision */
  uint32_t flags;             /* KV_NO_LOOKUP */
  const kv_strategy* decode;  /* NULL: "auto". Has no effect with KV_PRECISION_F32 */
  const kv_strategy* prefill; /* NULL: "full", exact attention */
  /* Bytes of host memory for the KV cache and everything stored with it; 0: no limit. Pages beyond
   * the limit go to an unnamed file, or stay in the loaded file, and are read on demand. Answers
   * are the same, bit for bit. The limit must hold the window, the page summaries (about a fifth
   * of the KV cache) and the pages of one step. A smaller limit is KV_LIMIT before any work, and
   * message has the minimum. Weights and workspace do not count. With KV_PRECISION_F32 a limit is
   * KV_BAD_ARGUMENT. */
  uint64_t memory_limit;
  /* Directory of that file. It should be on a local disk: a file in tmpfs saves no memory. NULL:
   * /var/tmp, on Windows the temporary directory. "": KV_BAD_ARGUMENT. The call that opens the
   * session resolves a relative path and tests the directory. No other user can open the file. It
   * disappears with the last session that uses it, also when the process is killed. */
  const char* spill_directory;
  /* System text before the document, NUL-terminated; NULL: none. At most 1,000,000 bytes. The first
   * kv_prefill or kv_generate of an empty sequence places it at the start of the chat format's
   * first turn. A blank line separates it from the document. It never becomes control tokens.
   * kv_prefill_tokens with instructions and an empty sequence is KV_BAD_STATE.
   * kv_session_from_cache with instructions is KV_BAD_ARGUMENT. kv_load with NULL uses the file's
   * text; a different text is KV_MODEL_MISMATCH. */
  const char* instructions;
  kv_log_fn log;  /* NULL: silent */
  void* log_user; /* passed to log */
  /* Tokens that the model's MTP layer drafts for each step of kv_generate, 1 to 3; 0: none. Answers
   * are the same, bit for bit: a step decides on the drafts together, and keeps those that decode
   * alone would sample. Prefill takes longer, and the layer has a KV cache of its own, which
   * kv_save saves. After kv_load of a file without it (kv_file_info.mtp_tokens is 0) the layer
   * attends later tokens only, and the log says so. A step has fewer drafts, or none, where they
   * take longer than they save. With a memory_limit that has no room for the layer's KV cache it
   * drafts none, and the log says so. Of a model on GPUs the layer is on the one that has the
   * output, if that has room (KV_PLAN_DRAFTS makes it), and otherwise on the CPU. kv_session_stats
   * counts drafts; the JSON says why there are none, and where the layer is. KV_UNSUPPORTED
   * (kv_model_info.mtp_layers is 0), KV_CORRUPT (a tensor of the layer, which message names).
   * Without drafts the layer is not read. */
  uint32_t draft_tokens;
  uint32_t reserved; /* 0 */
};

/* Whether a model thinks before it answers. */
typedef enum kv_thinking {
  KV_THINKING_OFF = 0, /* marks before the answer skip the thought */
  KV_THINKING_ON = 1   /* marks before the answer begin one */
} kv_thinking;

/* Options of kv_generate and kv_session_next. */
struct kv_generate_options {
  uint32_t struct_size;
  uint32_t flags;           /* KV_TOKENIZE_SPECIAL (question), KV_KEEP_TURN, KV_KEEP_THINKING,
                             * KV_TRACE_PASSAGES */
  uint64_t seed;            /* section 7 says when the same seed gives the same answer on a GPU */
  uint32_t max_tokens;      /* of the answer; 0: 512 */
  float temperature;        /* 0: greedy */
  uint32_t top_k;           /* 0: off */
  float top_p;              /* 0 or 1: off */
  float min_p;              /* 0: off */
  float repetition_penalty; /* over the last 256 tokens; 0 or 1: off */
  uint32_t stop_count;      /* strings in stop */
  uint32_t thinking;        /* kv_thinking. On: KV_UNSUPPORTED unless kv_model_info.thinks */
  const char* const* stop;  /* non-empty NUL-terminated strings. Each ends the answer and is not
                             * part of it. Used during the call only */
  kv_text_fn on_thinking;   /* receives the thought, with the call's `user`; NULL: none */
  uint32_t
      thinking_tokens; /* of a thought; then the call ends it, and the model answers. 0: 2048 */
  uint32_t reserved;   /* 0 */
};

/* Why an answer ended. */
typedef enum kv_stop_reason {
  KV_STOP_END_OF_TURN = 1,
  KV_STOP_STRING = 2,
  KV_STOP_MAX_TOKENS = 3,
  KV_STOP_CONTEXT_FULL = 4,
  KV_STOP_CANCELLED = 5
} kv_stop_reason;

/* Result of kv_generate. */
struct kv_answer {
  uint32_t struct_size;     /* in */
  uint32_t stop_reason;     /* kv_stop_reason */
  uint64_t question_tokens; /* with the marks of the turn */
  uint64_t answer_tokens;   /* without the end-of-turn token */
  uint64_t first_token_ns;  /* from the call to the first token */
  uint64_t total_ns;        /* from the call to its return */
  uint64_t tokens_read;     /* tokens whose K and V were read: sum over steps, layers, KV heads */
  uint64_t tokens_present;  /* the same sum for full attention */
  uint64_t thinking_tokens; /* of the thought, without its marks */
};

/* -- Status texts and version -- */

/* Returns a short English text, or "unknown status". Static storage. Any thread. */
KV_API const char* kv_status_text(kv_status status);

/* Returns 1 for KV_VERSION and KV_MODEL_MISMATCH: delete the file and prefill again. Any thread. */
KV_API int32_t kv_status_is_stale(kv_status status);

#define KV_VERSION_NUMBER 200 /* of this header: major * 10000 + minor * 100 + patch */

/* Returns KV_VERSION_NUMBER of the loaded library. A program that loads the library by hand
 * compares it first: while major is 0, another minor version is another ABI. docs/abi.md */
KV_API uint32_t kv_version(void);

/* Returns JSON: version, cache format, compiler, kernels chosen for this CPU, backends of this
 * build ("cpu", "cuda"), versions of third-party libraries. Static storage. Any thread. */
KV_API const char* kv_build_info(void);

/* ==== 4 Models and sessions =================================================================== */

/* -- Models -- */

/* Increments the reference count and returns `model`. The caller closes it once more. */
KV_API kv_model* kv_model_retain(kv_model* model);

/* Description of a model. With KV_VOCABULARY_ONLY, or of a file without tensors, the numbers but
 * `vocabulary` are 0, and `weights` is empty. */
typedef struct kv_model_info {
  uint32_t struct_size;        /* in */
  uint32_t layers;             /* transformer blocks */
  uint32_t width;              /* elements of the residual stream */
  uint32_t heads;              /* query heads per layer */
  uint32_t kv_heads;           /* KV heads per layer */
  uint32_t head_dim;           /* elements per head */
  uint32_t feed_forward;       /* elements of the FFN's hidden layer */
  uint32_t vocabulary;         /* tokens */
  uint64_t context_tokens;     /* length that the model was trained for */
  uint64_t parameters;         /* elements of all weights */
  uint64_t weight_bytes;       /* in the file */
  uint64_t kv_bytes_per_token; /* with scales and page summaries */
  char architecture[32];       /* of the GGUF: "llama", "qwen3" */
  char name[64];               /* the model's own, truncated */
  char weights[96];            /* formats, most used first: "Q4_K Q6_K F32" */
  char tokenizer[32];          /* of the GGUF: "gpt2", "llama" */
  char chat_format[16];        /* a name of kv_model_options.chat_format, or "custom" */
  char fingerprint[72];        /* of metadata, tensor table and samples of the weights, 64
                                * hexadecimal digits: cache files belong to it */
  char hash[40];               /* of the whole file, 32 hexadecimal digits; empty while unknown. A
                                * model with another hash refuses files saved while it was known */
  uint32_t thinks;             /* 1: it can think in its chat format */
  uint32_t mtp_layers;         /* that predict one token more, for draft_tokens; not in `layers` */
} kv_model_info;

/* Describes an open model. Any thread. */
KV_API kv_status kv_model_get_info(const kv_model* model, kv_model_info* info, kv_error* error);

/* Hashes the whole model file on the calling thread, unless the hash is known; kv_model_get_info
 * then has it. The call stores it in hash_directory if there is one, unless the file was written in
 * the last two seconds. A second call waits for the first. Any thread. Progress: KV_PHASE_VERIFY.
 * KV_CANCELLED, KV_IO, KV_CORRUPT (the file changed while it was open), KV_NO_MEMORY. */
KV_API kv_status kv_model_hash(kv_model* model, const kv_control* control, kv_error* error);

/* Describes a model file, which may have no tensors. Reads metadata, no weights, in about 50 ms for
 * 128,000 tokens of vocabulary. Any thread. Codes of kv_open. */
KV_API kv_status kv_model_inspect(const char* path, kv_model_info* info, kv_error* error);

/* Tokenizes text in linear time. Writes up to `capacity` ids to `tokens` (NULL if 0), and the total
 * number to *count. flags: KV_TOKENIZE_SPECIAL, _BOS, _DOCUMENT. Any thread.
 * KV_LIMIT (capacity too small: the part that fits was written), KV_CANCELLED, KV_NO_MEMORY. */
KV_API kv_status kv_tokenize(const kv_model* model, const char* text, size_t size, uint32_t flags,
                             const kv_control* control, int32_t* tokens, size_t capacity,
                             size_t* count, kv_error* error);

/* Writes up to `capacity` bytes of the tokens' text, unterminated, and the total number to *size.
 * Omits control tokens unless flags has KV_TOKENIZE_SPECIAL. Omits the first token's leading space
 * where the tokenizer adds one (SentencePiece). Any thread. KV_LIMIT as kv_tokenize;
 * KV_BAD_ARGUMENT (an id outside the vocabulary), KV_NO_MEMORY. */
KV_API kv_status kv_detokenize(const kv_model* model, const int32_t* tokens, size_t count,
                               uint32_t flags, char* text, size_t capacity, size_t* size,
                               kv_error* error);

/* -- Sequences -- */

/* Appends the caller's own tokens, without a turn or special tokens. After a failure the complete
 * chunks stay; *tokens_done (may be NULL) is written in every case. Progress and codes of
 * kv_prefill; KV_BAD_ARGUMENT (an id outside the vocabulary). */
KV_API kv_status kv_prefill_tokens(kv_session* session, const int32_t* tokens, size_t count,
                                   const kv_control* control, uint64_t* tokens_done,
                                   kv_error* error);

/* Copies up to `capacity` tokens of the sequence to `tokens` (NULL if 0), and writes the total
 * number to *count. KV_LIMIT (capacity too small: the part that fits was written), KV_BUSY. */
KV_API kv_status kv_session_tokens(const kv_session* session, int32_t* tokens, size_t capacity,
                                   size_t* count, kv_error* error);

/* Truncates the sequence to its first `tokens` tokens. Tokens that had left the window return with
 * the precision of their pages. The next step recomputes the last token. Its rounding differs from
 * that of a prefill chunk, so the order of nearly equal logits may change. Not cancellable: about
 * 10 ms for an 8B model with the default window, and proportional to window_tokens. States of
 * recurrent layers may be read from the file besides.
 * A model with sliding windows has dropped keys and values that no later token sees, and a state of
 * a recurrent layer cannot go back. Such a model goes on from the nearest checkpoint
 * (docs/memory-and-files.md). One is the end of the document; windows also serve a rewind of about
 * 200 tokens. After any other rewind the next prefill, question, kv_session_next, kv_session_score,
 * kv_session_prepare or kv_save first prefills the tokens from the checkpoint on again; tokens
 * before it have the precision of their pages. The control of that call reports and cancels it, and
 * the tokens stay. Where logits are missing, kv_session_next and kv_session_score prefill a model
 * with recurrent layers again from the checkpoint before the last token.
 * A sequence that ends within the instructions takes no text: kv_prefill and kv_generate are
 * KV_BAD_STATE until a rewind to 0.
 * KV_BAD_ARGUMENT (the sequence is shorter), KV_CORRUPT (a damaged page or checkpoint of a file),
 * KV_NO_MEMORY, KV_BUSY. */
KV_API kv_status kv_session_rewind(kv_session* session, uint64_t tokens, kv_error* error);

/* Creates a session with an exact copy of the sequence and the same options. Both share the pages;
 * each writes only its own tail. The caller closes *out with kv_session_close.
 * KV_NO_MEMORY, KV_LIMIT, KV_BUSY. */
KV_API kv_status kv_session_fork(kv_session* session, kv_session** out, kv_error* error);

/* Builds the decode strategy's index, sketch or representatives now. Otherwise kv_generate,
 * kv_session_score or kv_save builds them. kv_session_next builds no index and scores every token
 * instead. With a GPU, the call also uploads the data that the GPU reads. kv_save saves an index
 * and forks share it, so a fork in another thread may build it. docs/strategies.md says when an
 * index is extended and when it is rebuilt. Progress: KV_PHASE_PREPARE.
 * KV_CANCELLED, KV_NO_MEMORY, KV_LIMIT (memory_limit), KV_CORRUPT, KV_BUSY. */
KV_API kv_status kv_session_prepare(kv_session* session, const kv_control* control,
                                    kv_error* error);

/* Replaces the decode strategy; NULL: "auto". Other options stay. The library copies it.
 * KV_BAD_ARGUMENT (a parameter that does not fit), KV_NO_MEMORY, KV_BUSY. */
KV_API kv_status kv_session_set_strategy(kv_session* session, const kv_strategy* decode,
                                         kv_error* error);

/* -- Answers -- */

/* Samples one token after the end of the sequence and appends it: a raw continuation without turns.
 * Neither this call nor kv_generate samples a token that the file suppresses.
 * Of the options it uses only seed, temperature, top_k, top_p, min_p and repetition_penalty. *token
 * receives the id. *end (may be NULL) receives 1 if the token ends the turn, otherwise 0.
 * KV_BAD_STATE (the sequence is empty), KV_CONTEXT_FULL, KV_CANCELLED, KV_NO_MEMORY, KV_LIMIT,
 * KV_CORRUPT, KV_BUSY. */
KV_API kv_status kv_session_next(kv_session* session, const kv_generate_options* options,
                                 const kv_control* control, int32_t* token, int32_t* end,
                                 kv_error* error);

/* Scores a given continuation: log_probabilities[i], float32 [count], receives the natural
 * logarithm of the probability of tokens[i] after everything before it. exp(-mean) is the
 * perplexity. Each token is decoded with the strategy. Afterwards the sequence is exactly as
 * before, and statistics describe these steps. Progress: KV_PHASE_PREPARE, then KV_PHASE_PREFILL.
 * KV_CANCELLED, KV_BAD_STATE (the sequence is empty), KV_CONTEXT_FULL, KV_NO_MEMORY, KV_LIMIT (as
 * kv_generate), KV_CORRUPT, KV_BUSY. */
KV_API kv_status kv_session_score(kv_session* session, const int32_t* tokens, size_t count,
                                  float* log_probabilities, const kv_control* control,
                                  kv_error* error);

/* Passage of the document: neighbouring tokens, and the bytes of the text that they spell. */
typedef struct kv_passage {
  uint64_t first_token; /* index in kv_session_tokens; of kv_session_compose, in the document */
  uint64_t tokens;      /* 1 or more */
  uint64_t first_byte;  /* in the document, all texts of kv_prefill in order. UINT64_MAX: unknown,
                         * after kv_prefill_tokens or if the tokens do not spell the document */
  uint64_t bytes;       /* widened to whole UTF-8 characters; 0 where first_byte is unknown */
  float share;          /* of all recorded attention, 0 to 1 */
  uint32_t document;    /* of kv_session_compose: its index; otherwise 0 */
} kv_passage;

/* Lists the passages that the last answer attended, the largest share first. Attention does not
 * prove that the answer is based on a passage. The kv_generate call needs KV_TRACE_PASSAGES; a
 * stopped answer has passages too.
 * Shares count attention that the strategy computed, and only in the document: not the first 4
 * tokens, instructions, marks or the conversation. A passage consists of blocks of 16 tokens (8
 * where head_dim is over 128, 4 where it is over 256), so it may begin or end within a word. Blocks
 * with less than a twentieth of the largest block's share are omitted. docs/strategies.md says how
 * attention is weighted.
 * Writes up to `capacity` passages (NULL if 0), and the total number, at most 64, to *count. The
 * session keeps the passages until a call begins to change the sequence. Forks and files do not
 * have them.
 * KV_BAD_STATE (the last answer was not traced, or the sequence has changed since), KV_LIMIT
 * (capacity too small: the part that fits was written), KV_NO_MEMORY, KV_BUSY. */
KV_API kv_status kv_session_passages(kv_session* session, kv_passage* passages, size_t capacity,
                                     size_t* count, kv_error* error);

/* -- Statistics -- */

/* Bits of kv_session_stats.gpu_flags. With several GPUs a bit is set only if it holds for all. */
#define KV_GPU_OUTPUT 1u      /* it computes the output layer */
#define KV_GPU_ATTENDS 2u     /* it attends alone in its layers */
#define KV_GPU_COEXECUTES 4u  /* CPU and GPU attend each layer together */
#define KV_GPU_READS_PAGES 8u /* it reads pinned host memory; otherwise the CPU stages pages */

/* State of a session and its last decode (kv_generate, kv_session_next or kv_session_score). */
typedef struct kv_session_stats {
  uint32_t struct_size;         /* in */
  uint32_t threads;             /* including the caller's */
  uint64_t tokens;              /* of the sequence */
  uint64_t context_tokens;      /* maximum */
  uint64_t sealed_tokens;       /* in pages */
  uint32_t page_tokens;         /* tokens per page */
  uint32_t sink_tokens;         /* first tokens, always attended */
  uint32_t window_tokens;       /* newest tokens, not sealed */
  uint32_t prefill_chunk;       /* tokens per prefill step */
  uint64_t kv_bytes_per_token;  /* with scales and page summaries */
  uint64_t private_bytes;       /* of KV cache, summaries and indexes, in host memory */
  uint64_t mapped_bytes;        /* in the loaded file */
  uint64_t spilled_bytes;       /* in the spill file */
  uint64_t memory_limit;        /* 0: none */
  uint64_t prefill_tokens;      /* appended by kv_prefill in this session */
  uint64_t prefill_ns;          /* time of these prefills */
  uint64_t sparse_tokens;       /* length up to the last sparse token; 0: all are exact */
  uint64_t load_ns;             /* of kv_load; 0: not loaded */
  uint64_t budget_tokens;       /* mean per layer and head */
  uint64_t index_tokens;        /* in the strategy's index; 0: none */
  uint64_t index_bytes;         /* size of that index */
  uint64_t index_ns;            /* of the last build in this session */
  uint64_t last_steps;          /* tokens decoded by the last decode */
  uint64_t last_decode_ns;      /* without prefill and first token */
  uint64_t last_tokens_read;    /* as kv_answer.tokens_read */
  uint64_t last_tokens_present; /* as kv_answer.tokens_present */
  uint64_t last_pages_touched;  /* pages read, sum over steps, layers, KV heads */
  double last_mass_read;     /* estimated share of attention that was read and not sampled, 0 to 1;
                              * -1: the strategy does not estimate it */
  uint32_t gpu_layers;       /* layers on GPUs */
  uint32_t gpu_flags;        /* KV_GPU_* */
  uint64_t gpu_weight_bytes; /* weights on GPUs */
  uint64_t gpu_bytes;        /* in use, weights included, sum of all GPUs */
  uint64_t gpu_memory_limit; /* bytes that they may use */
  char decode_strategy[32];  /* chosen for the next token; "auto" is resolved */
  char chat_format[32];      /* of the turns */
  char device[64];           /* "cpu", "cuda:0", "cuda:0,cuda:1", truncated */
  uint64_t prefilled_again;  /* tokens prefilled again, after a rewind or for a prefix */
  uint64_t windows_bytes;    /* of layers with a sliding window, in memory and in the loaded file;
                              * included above */
  uint64_t last_drafted;     /* tokens that were drafted for the last answer */
  uint64_t last_accepted;    /* those of them that the answer has */
  uint64_t last_looked_up;   /* those of last_drafted that a lookup drafted */
  uint64_t last_lookup_accepted; /* those of last_looked_up that the answer has */
} kv_session_stats;

/* Fills *stats. KV_NO_MEMORY, KV_BUSY. */
KV_API kv_status kv_session_get_stats(kv_session* session, kv_session_stats* stats,
                                      kv_error* error);

/* Writes JSON for people: the fields above, and the reasons for the choice of strategy and device.
 * docs/cli.md lists the keys; new ones may be added. Writes up to `capacity` bytes with a final NUL
 * (NULL if 0), and the needed size to *size. KV_LIMIT (capacity too small), KV_NO_MEMORY, KV_BUSY.
 */
KV_API kv_status kv_session_stats_json(kv_session* session, char* json, size_t capacity,
                                       size_t* size, kv_error* error);

/* ==== 5 Files ================================================================================= */

/* Creates a session from the first `tokens` tokens of a file (0: all), as if only those had been
 * prefilled. It shares the pages with the file. The strategy reads nothing after them.
 * The call prefills the newest tokens again, at most window_tokens and a page, because the file has
 * them as int8 pages only. kv_load with kv_session_rewind keeps the int8 precision instead. The
 * session is bit for bit as after a prefill if the file's own window holds these tokens, or if the
 * file has full precision. `tokens` within the instructions: as kv_session_rewind.
 * For a model with sliding windows or recurrent layers the call prefills from the file's nearest
 * checkpoint on. Progress: KV_PHASE_VERIFY, KV_PHASE_PREFILL. control->flags: KV_VERIFY.
 * KV_BAD_ARGUMENT (the file has fewer tokens), KV_UNSUPPORTED (of a session of kv_session_compose),
 * and the codes of kv_load. */
KV_API kv_status kv_load_prefix(kv_model* model, const char* path, uint64_t tokens,
                                const kv_session_options* options, const kv_control* control,
                                kv_session** out, kv_error* error);

/* Options of kv_session_compose. */
typedef struct kv_compose_options {
  uint32_t struct_size;
  uint32_t max_documents;            /* that an answer attends; 0: up to 8. At least as many as
                                      * there are: all, without a choice, if they fit */
  const kv_session_options* session; /* as for kv_load; NULL: defaults */
} kv_compose_options;

/* Creates a session over several saved documents. The files are mapped: nothing is copied, and
 * nothing is prefilled again. The documents follow one another in this order, then the questions
 * and answers. Each document was prefilled without the others, so its KV cache says nothing of
 * them. Of later documents, the marks and instructions before the text are left out as far as the
 * first page has them. Layers with a sliding window or a recurrent state see the questions and
 * answers alone.
 * One path: as kv_load, bit for bit.
 * kv_session_tokens and kv_session_rewind count the questions and answers alone; the memory in
 * kv_session_stats includes the documents.
 * Each kv_generate with a question chooses the documents that the question is about
 * (kv_session_get_document): one or several; if none stands out, as many as allowed. It runs the
 * question up to three times. If it chooses several, because they stand out, it first prefills a
 * passage of each again, up to 128 tokens: while kv_session_tokens is empty, where the context and
 * the memory_limit have room for them besides max_tokens, and not for a kept turn with a thought.
 * Progress counts them, kv_answer.question_tokens does not. A kept turn has none of them, and the
 * next call prefills it. The context holds the documents that an answer attends too.
 * Room for max_tokens of the answer, up to an eighth of the context, counts with the question.
 * Without a question kv_generate goes on with the documents of the last answer, as do
 * kv_session_next and kv_session_score; while kv_session_tokens is empty these two return
 * KV_BAD_STATE.
 * The session takes no text (kv_prefill, kv_prefill_tokens): KV_UNSUPPORTED. Its memory_limit holds
 * for all documents together. The caller closes *out with kv_session_close.
 * kv_save writes a small file with the questions and answers. It refers to the documents by their
 * paths from its folder, and by the checksums of their files. kv_load maps them again, from these
 * places, if they are unchanged. Such a file is not a document: a library composes it only by its
 * name and alone, and does not evict it. kv_save: KV_BAD_ARGUMENT (the path is a document's; a
 * document is on another drive; a relative path of more than 1000 bytes or with a control
 * character), KV_LIMIT (relative paths of more than about 1 MB together).
 * KV_BAD_ARGUMENT (no path; a file with a question or without text), KV_MODEL_MISMATCH (as kv_load;
 * other instructions, another chat format or kind of text than the first document's),
 * KV_UNSUPPORTED (a model with scaled norms after RoPE; a strategy other than auto, full, bounded,
 * window, quest, flat and dipr; draft_tokens), and the codes of kv_load. */
KV_API kv_status kv_session_compose(kv_model* model, const char* const* paths, size_t count,
                                    const kv_compose_options* options, const kv_control* control,
                                    kv_session** out, kv_error* error);

/* Bits of kv_session_document.flags. */
#define KV_DOCUMENT_CANDIDATE 1u /* kv_generate may choose it */
#define KV_DOCUMENT_ATTENDED 2u  /* the last answer attended it */

/* A document of kv_session_compose. */
typedef struct kv_session_document {
  uint32_t struct_size; /* in */
  uint32_t flags;       /* KV_DOCUMENT_CANDIDATE, KV_DOCUMENT_ATTENDED */
  uint64_t tokens;      /* of the document */
  double score;         /* share of the evidence for the last question, 0 to 1, of which all
                         * candidates have 1 together; -1: documents were not compared */
  const char* path;     /* until kv_session_set_documents, or until the session is closed */
} kv_session_document;

/* Fills *document for an index, in the order of kv_session_compose. KV_NOT_FOUND after the last,
 * KV_BAD_STATE (not of kv_session_compose), KV_BAD_ARGUMENT, KV_BUSY. */
KV_API kv_status kv_session_get_document(kv_session* session, uint32_t index,
                                         kv_session_document* document, kv_error* error);

/* Writes the token ids of a document of kv_session_compose, as kv_session_tokens does; passages
 * refer to them. KV_NOT_FOUND, KV_BAD_STATE (as kv_session_get_document), KV_LIMIT, KV_BUSY. */
KV_API kv_status kv_session_document_tokens(kv_session* session, uint32_t index, int32_t* tokens,
                                            size_t capacity, size_t* count, kv_error* error);

/* Limits the later answers of a session of kv_session_compose to these documents, ascending
 * indexes; count 0: removes the limit. KV_BAD_STATE, KV_BAD_ARGUMENT, KV_BUSY,
 * KV_NO_MEMORY. */
KV_API kv_status kv_session_limit_documents(kv_session* session, const uint32_t* documents,
                                            size_t count, kv_error* error);

/* Replaces the documents of a session of kv_session_compose by other ones, more or fewer. The files
 * are mapped; questions and answers stay as they are, with what they attended. The limit of
 * kv_session_limit_documents ends. kv_session_next and kv_session_score go on with those documents
 * of the last answer that are still there, otherwise with the first. Until the call returns, old
 * and new documents take memory. After a failure the session has the old ones.
 * KV_BAD_STATE (not over several documents: kv_session_compose of one path is not),
 * KV_MODEL_MISMATCH (other turns than those of the session), and the codes of kv_session_compose;
 * KV_BUSY. */
KV_API kv_status kv_session_set_documents(kv_session* session, const char* const* paths,
                                          size_t count, const kv_control* control, kv_error* error);

/* Description of a cache file. */
typedef struct kv_file_info {
  uint32_t struct_size;      /* in */
  uint32_t format_version;   /* docs/file-format.md */
  uint64_t file_bytes;       /* of the whole file */
  uint64_t tokens;           /* of the sequence */
  uint64_t sealed_tokens;    /* the first of these, in pages */
  uint64_t kv_bytes;         /* pages, scales and page summaries */
  uint32_t layers;           /* of the model, that have keys and values */
  uint32_t kv_heads;         /* per layer */
  uint32_t head_dim;         /* elements per head */
  uint32_t precision;        /* kv_precision */
  char model_name[64];       /* of the model that wrote it, truncated */
  char chat_format[32];      /* of its turns, or "custom"; empty: none, or written by an older
                            * library */
  uint32_t recurrent_layers; /* layers with a state; 0: none */
  uint32_t states;           /* in the file: of the sequence's end, and of checkpoints before it */
  uint64_t state_bytes;      /* of all states */
  uint64_t checkpoints;      /* positions before the end at which windows and states can go on */
  uint64_t checkpoint_tokens[64]; /* tokens before each, ascending; the others are 0 */
  uint64_t mtp_tokens; /* whose keys and values of the MTP layer it has; 0: saved without drafts */
  uint64_t documents;  /* of a session of kv_session_compose, to which the file refers; 0: none.
                        * Then the other fields describe questions and answers alone */
} kv_file_info;

/* Describes a cache file. Checks header and tables only. Any thread. KV_NOT_A_CACHE also for a
 * packed file: kv_packed_inspect. KV_NOT_FOUND, KV_PERMISSION, KV_IO, KV_VERSION, KV_CORRUPT,
 * KV_NO_MEMORY. */
KV_API kv_status kv_file_inspect(const char* path, kv_file_info* info, kv_error* error);

/* A document to which a file of a session of kv_session_compose refers. */
typedef struct kv_file_document {
  uint32_t struct_size; /* in */
  uint32_t flags;       /* KV_DOCUMENT_CANDIDATE, KV_DOCUMENT_ATTENDED */
  uint64_t tokens;      /* of the document */
  uint64_t file_bytes;  /* of its file when it was mapped */
  kv_status status;     /* KV_OK; KV_NOT_FOUND (it is missing), KV_MODEL_MISMATCH (it has changed),
                         * KV_IO, KV_PERMISSION: then kv_load of the file fails */
  uint32_t reserved;    /* 0 */
  char path[4096];      /* where it must be; absolute, truncated */
} kv_file_document;

/* Fills *document for an index, in the order of kv_session_compose. Opens the document's file and
 * checks its header. Any thread. KV_NOT_FOUND after the last, KV_NOT_FOUND with sys_errno (the file
 * at `path` is missing), and the codes of kv_file_inspect. */
KV_API kv_status kv_file_get_document(const char* path, uint32_t index, kv_file_document* document,
                                      kv_error* error);

/* Reads and verifies every byte of a cache file, but not of the documents to which it refers.
 * KV_CORRUPT names section and offset. Any thread.
 * Progress: KV_PHASE_VERIFY. KV_CANCELLED, and the codes of kv_file_inspect. */
KV_API kv_status kv_file_verify(const char* path, const kv_control* control, kv_error* error);

/* Writes a packed copy of a cache file, about 85% of its size, to send or archive. kv_unpack
 * restores it bit for bit; a packed file cannot be loaded. Takes less than 10 MiB of memory for any
 * file. `level` is 1 to 19; a higher level is slower and packs slightly smaller; 0: 1. packed_path
 * is replaced atomically, as by kv_save; after a failure it is as before. The call does not verify
 * sections: kv_file_verify does. Any thread. Progress: KV_PHASE_PACK.
 * KV_BAD_ARGUMENT (level; both paths are one file), KV_NOT_FOUND, KV_NOT_A_CACHE, KV_VERSION,
 * KV_CORRUPT (header or tables), KV_CANCELLED, KV_NO_SPACE, KV_PERMISSION, KV_IO, KV_NO_MEMORY. */
KV_API kv_status kv_pack(const char* path, const char* packed_path, uint32_t level,
                         const kv_control* control, kv_error* error);

/* Restores at `path` the cache file that kv_pack packed. Any thread. Progress: KV_PHASE_UNPACK.
 * Never writes more than the file's verified header says, nor more than 4 MiB plus 64 times the
 * packed file. Reserves no space. KV_CORRUPT (any byte differs from what was written), and the
 * codes of kv_pack. */
KV_API kv_status kv_unpack(const char* packed_path, const char* path, const kv_control* control,
                           kv_error* error);

/* Description of a packed file. */
typedef struct kv_packed_info {
  uint32_t struct_size;    /* in */
  uint32_t packed_version; /* docs/file-format.md */
  uint64_t file_bytes;     /* packed */
  uint64_t document_bytes; /* unpacked */
  uint64_t tokens;         /* of the sequence */
  uint32_t format_version; /* of the unpacked file */
  uint32_t level;          /* of compression */
  uint32_t layers;         /* of the model */
  uint32_t kv_heads;       /* per layer */
  uint32_t head_dim;       /* elements per head */
  uint32_t reserved;       /* 0 */
  char model_name[64];     /* of the model that wrote it, truncated */
} kv_packed_info;

/* Describes a packed file. Checks its header and size only. Any thread. KV_NOT_A_CACHE (another
 * kind of file), and the codes of kv_file_inspect. */
KV_API kv_status kv_packed_inspect(const char* path, kv_packed_info* info, kv_error* error);

/* ==== 6 Library ===============================================================================
 *
 * A library is a folder of cache files with automatic reuse of prefixes. Each text is prefilled
 * once. If a text shares a prefix with a document, only the rest is prefilled.
 * Documents are the regular files NAME.kv in the folder that begin as a cache file does. The user
 * may copy files of kv_save into the folder. NAME has 1 to 200 bytes of UTF-8 that the system
 * allows, with no slash, backslash or control character, and no dot at its beginning. Other files,
 * symbolic links and packed files are ignored: not listed, counted, evicted, removed or replaced.
 * Each document is a complete file: two documents store a common prefix twice.
 * Only the owner can access folder and files (modes 0700 and 0600). Processes and threads may use
 * one folder at once. A document that a session maps, in any process, is neither evicted nor
 * removed. A killed process leaves at most a temporary file and documents over max_bytes. The next
 * kv_library_open removes the file. The next kv_library_open or save evicts the documents.
 */
typedef struct kv_library kv_library;

/* Options of a library. */
typedef struct kv_library_options {
  uint32_t struct_size;
  uint32_t flags;     /* 0 */
  uint64_t max_bytes; /* of all documents; 0: no limit. A save and kv_library_open evict the least
                       * recently used documents. A save evicts after the new file is durable, so a
                       * failed save evicts none. If the process is killed in between, the excess
                       * stays until the next save or kv_library_open */
  kv_log_fn log;      /* receives evictions and unusable documents; documents of another version
                       * once per handle. NULL: silent */
  void* log_user;     /* passed to log */
} kv_library_options;

/* Opens the folder and resolves a relative path. Creates a missing folder, but not its parents. A
 * folder without write permission is read-only: nothing is saved or evicted, and the log has a line
 * about it. The caller closes *out with kv_library_close.
 * KV_NOT_FOUND, KV_PERMISSION, KV_IO, KV_BUSY (another process has been changing the library for 10
 * seconds), KV_NO_MEMORY. */
KV_API kv_status kv_library_open(const char* folder, const kv_library_options* options,
                                 kv_library** out, kv_error* error);

/* Closes the handle. The folder stays as it is; sessions stay usable. */
KV_API void kv_library_close(kv_library* library);

/* A document of a library. */
typedef struct kv_library_document {
  uint32_t struct_size; /* in */
  kv_status status;     /* KV_OK, or the reason why the file is unusable: KV_CORRUPT, KV_VERSION,
                         * KV_NOT_A_CACHE and others. Then tokens is 0, and model_name and
                         * fingerprint are empty */
  uint64_t file_bytes;  /* on the disk */
  uint64_t tokens;      /* of the sequence */
  uint64_t last_used;   /* nanoseconds since 1970 */
  char name[208];       /* without .kv */
  char model_name[64];  /* of the model that wrote it, truncated */
  char fingerprint[72]; /* as kv_model_info.fingerprint */
} kv_library_document;

/* Fills *document for an index, the most recently used first. KV_NOT_FOUND after the last. Index 0
 * scans the folder. Larger indexes continue that listing, so one thread at a time may list. A file
 * that cannot be read is listed with its status. It does not count towards max_bytes and is never
 * evicted.
 * KV_IO, KV_PERMISSION, KV_NOT_FOUND with sys_errno (the folder is gone), KV_NO_MEMORY. */
KV_API kv_status kv_library_list(kv_library* library, uint32_t index, kv_library_document* document,
                                 kv_error* error);

/* Options of kv_library_session. */
typedef struct kv_library_session_options {
  uint32_t struct_size;
  uint32_t flags;                    /* KV_TOKENIZE_SPECIAL, KV_VERIFY, KV_REPLACE */
  const char* name;                  /* of the saved document; NULL: a hash */
  const kv_session_options* session; /* as for kv_session_open; NULL: defaults */
} kv_library_session_options;

/* Result of kv_library_session. */
typedef struct kv_library_result {
  uint32_t struct_size;  /* in */
  kv_status save_status; /* KV_OK, or the reason why the save failed; *out exists either way */
  uint64_t tokens;       /* of the text */
  uint64_t tokens_found; /* the first of these, found in a document */
  uint32_t saved;        /* 1: saved by this call; 0: found, saved by another call meanwhile, or not
                          * saved (save_status) */
  char name[212];        /* of the document found or saved */
} kv_library_result;

/* Creates a session whose sequence is the text, as after kv_prefill. The call maps the document
 * that shares the longest prefix, as kv_load_prefix does, prefills the rest and saves the result.
 * A document qualifies if model, chat format, window_tokens, precision and prefill strategy with
 * its parameters are the same. If a document begins with the whole text, nothing is saved. Each
 * call reads the header of every document. `result` may be NULL. The caller closes *out with
 * kv_session_close.
 *
 * Saving. A failed or cancelled save does not fail this call; result->save_status has the code.
 * KV_NO_SPACE there means that the document cannot fit within max_bytes; nothing was evicted or
 * replaced for it. If another file has the name, the call appends a dash and 8 hexadecimal digits
 * of text and model to it; result->name has the new name. KV_REPLACE instead replaces any document
 * of that name.
 *
 * Damage. The call skips a damaged document. The new one replaces it under two conditions: `name`
 * is NULL or the damaged document's, and one of the two texts is a prefix of the other. If only the
 * save meets the damage, the call prefills the text again without that document, while both
 * sessions are in memory. If this prefill fails or is cancelled, *out is the first session and
 * save_status is KV_CORRUPT. Each later call on that session that meets the damage returns
 * KV_CORRUPT.
 *
 * Progress: KV_PHASE_VERIFY, KV_PHASE_PREFILL, KV_PHASE_PREPARE, KV_PHASE_SAVE.
 * KV_BAD_ARGUMENT (also an empty text), KV_CANCELLED (nothing was saved; the prefill is lost),
 * KV_CONTEXT_FULL, KV_NO_MEMORY, KV_IO, and the codes of kv_session_open. */
KV_API kv_status kv_library_session(kv_library* library, kv_model* model, const char* text,
                                    size_t size, const kv_library_session_options* options,
                                    const kv_control* control, kv_session** out,
                                    kv_library_result* result, kv_error* error);

/* Creates a session over several documents, as kv_session_compose: those named, in this order, or
 * with count 0 all of this model, by name. With count 0 documents that cannot be used are left out,
 * and the log has the reason. kv_session_document.path is the folder, a slash and the name with
 * .kv. Documents that come or go later do not change the session, which maps its own.
 * KV_NOT_FOUND (no document of this model, or of a name), and the codes of kv_session_compose. */
KV_API kv_status kv_library_compose(kv_library* library, kv_model* model, const char* const* names,
                                    size_t count, const kv_compose_options* options,
                                    const kv_control* control, kv_session** out, kv_error* error);

/* Renames a document, durably. KV_NOT_FOUND (no document has the name; another file may have it),
 * KV_BAD_STATE (a document or a file has the new name), KV_BAD_ARGUMENT (a name that no document
 * can have), KV_IO, KV_PERMISSION, KV_BUSY (as kv_library_open). */
KV_API kv_status kv_library_rename(kv_library* library, const char* from, const char* to,
                                   kv_error* error);

/* Removes a document, durably. The session that prefilled and saved it keeps its pages in memory
 * and stays usable. KV_NOT_FOUND (as kv_library_rename), KV_BUSY (a session maps the document, or
 * as kv_library_open), KV_IO, KV_PERMISSION. */
KV_API kv_status kv_library_remove(kv_library* library, const char* name, kv_error* error);

/* ==== 7 GPU ===================================================================================
 *
 * kv_model_options.device chooses the device that computes the layers:
 *
 *   NULL, "cpu"        the CPU, with weights in the mapped file
 *   "cuda", "cuda:1"   one NVIDIA GPU. Its memory receives as many of the first layers as fit, and
 *                      the output layer
 *   "cuda:0,cuda:1"    a list, in which an entry may be repeated. The layers are split over the
 *                      GPUs in this order, by memory; the GPUs work in turn
 *   "cuda:all"         all usable GPUs, as a list
 *   "auto"             the GPU with the most free memory, if the whole model fits; otherwise all
 *                      GPUs; the CPU if not one layer fits a GPU
 *
 * The KV cache stays in host memory or in the mapped file. In each of its layers a GPU computes
 * attention if it can; otherwise the CPU does, or both do. kv_session_stats has the result,
 * kv_session_stats_json the reason.
 * Decode on a GPU pins host memory while the session is open; call kv_session_prepare first where
 * several forks will answer.
 * A failed GPU is KV_DEVICE, from any call on its model: close the sessions and the model, then
 * open it with "cpu".
 * With a GPU, the same seed gives the same answer only after kv_session_prepare and with one model
 * open, because sums are rounded differently. docs/gpu.md has the details.
 * Codes of kv_open: KV_NOT_FOUND (no such GPU, or no driver), KV_UNSUPPORTED (a build without
 * CUDA), KV_BAD_ARGUMENT (device_memory without a GPU), KV_NO_MEMORY (not one layer fits; message
 * has the minimum). "auto" uses the CPU instead.
 */

/* ==== 8 Strategies ============================================================================
 *
 * A strategy decides which sealed pages attention reads. Sinks and window are always attended.
 * docs/strategies.md compares the strategies.
 *
 *   name            reads                                             parameters (KV_PARAM_...)
 *   "auto"          "full" up to 4096 sealed tokens, then "bounded"   B D H, COVERAGE
 *   "full"          everything                                        none
 *   "window"        sinks and window only                             D
 *   "bounded"       tokens found by a sketch of the keys, and a       B D H, COVERAGE
 *                   sample that represents the rest
 *   "quest"         blocks with the largest upper bounds (Quest)      B D H, SELECT_TOKENS
 *   "flat"          tokens with the largest scores, by an int8 scan   B D H
 *   "dipr"          tokens whose attention is at least ALPHA of the   B D H, ALPHA
 *                   largest, by a scan
 *   "dipr-graph"    the same, by the graph of "ood"                   B D H, ALPHA
 *   "ood"           tokens found in a graph built from queries        B D H
 *                   (RetrievalAttention)
 *   "hnsw"          tokens found in a graph built from keys           B D H
 *   "filter-layers" tokens that a few layers choose for the layers    B, kv_strategy_set_layers
 *                   after them (OmniKV)
 *   B: BUDGET_TOKENS or BUDGET_FRACTION; the one set last counts. D: DENSE_LAYERS. H: SHARE_HEADS.
 *
 * Prefill. kv_session_options.prefill takes "full", "bounded", "quest", "flat", "window" and
 * "filter-layers". All but "full" are sparse: several times faster for long texts, after 4096 exact
 * tokens. About forty neighbouring tokens then share one selection, and also attend sinks, window
 * and the newest 512 tokens. On a GPU, by "bounded", 128 query rows of a KV head share one. The KV
 * cache differs slightly from the exact one
 * (kv_session_stats.sparse_tokens), least with "bounded". Parameters: EXACT_TOKENS; BUDGET_FRACTION
 * except for "window" (default 0.1, at least 2048 tokens); the layers of "filter-layers", which
 * attend everything.
 *
 * The library never ignores a parameter that does not apply: KV_BAD_ARGUMENT, and message names
 * strategy and parameter. kv_strategy_set refuses a parameter that the strategy does not have. The
 * call that receives the strategy refuses one that its use (decode, prefill, kv_cache) does not
 * have. */

/* Parameters. Numbers never change. kvasir_experimental.h has those from 1000 on. */
typedef enum kv_param {
  KV_PARAM_BUDGET_TOKENS = 1,   /* tokens per layer and head, as a mean over layers; at least 1 */
  KV_PARAM_BUDGET_FRACTION = 2, /* part of the sealed tokens, over 0 to 1. Default, with a minimum
                                 * of 512 tokens: "bounded" 0.01, "quest" "flat" "ood" "hnsw" 0.02,
                                 * "filter-layers" 0.067. "dipr" "dipr-graph": 0.1, at least 1024
                                 * tokens, as an upper limit. Documents that an answer attends
                                 * together divide the minimum; a budget that is set holds for
                                 * each. Of prefill: 0.1 */
  KV_PARAM_DENSE_LAYERS = 3,    /* layers with full attention. Default: "quest" 2, others 0. They
                                 * are the layers with the largest error of the strategy, measured
                                 * in prefill. Below 2048 sealed tokens, and in a kv_cache, they are
                                 * the first layers */
  KV_PARAM_SHARE_HEADS = 4,     /* 1 (default): one selection per group of query heads; 0: one per
                                 * query head */
  KV_PARAM_ALPHA = 5,           /* smallest attention of a token to read, relative to the largest;
                                 * over 0 to 1. Default: 0.012 */
  KV_PARAM_COVERAGE = 6,        /* 1 - the expected standard error of the sampled attention; between
                                 * 0 and 1. Each layer of a step reads enough tokens for it: a
                                 * random number, from a quarter of the budget to four times it.
                                 * Default: 0.96 with the default budget; with another budget none,
                                 * and each token reads the budget */
  KV_PARAM_SELECT_TOKENS = 7,   /* neighbouring tokens selected together: a multiple of 16 (of 8
                                 * where head_dim is over 128, of 4 where it is over 256) up to
                                 * 1024. Default: 16 (8, 4) */
  KV_PARAM_EXACT_TOKENS = 8     /* prefill only: exact tokens at the end of each kv_prefill.
                                 * Default: 0 */
} kv_param;

/* Creates a strategy with its defaults. It serves any number of sessions, which copy it. One thread
 * at a time may change it. The caller destroys *out with kv_strategy_destroy.
 * KV_BAD_ARGUMENT (unknown name: the message lists all), KV_NO_MEMORY. */
KV_API kv_status kv_strategy_create(const char* name, kv_strategy** out, kv_error* error);

/* Destroys the strategy. Sessions keep their copies. NULL does nothing. */
KV_API void kv_strategy_destroy(kv_strategy* strategy);

/* Sets a parameter, a kv_param. KV_BAD_ARGUMENT (no such parameter; a value out of range): the
 * strategy is unchanged. */
KV_API kv_status kv_strategy_set(kv_strategy* strategy, uint32_t param, double value,
                                 kv_error* error);

/* Writes a parameter, or the default of one that is not set, to *value. It is 0 if the default
 * depends on the model or on another parameter. Of BUDGET_TOKENS and BUDGET_FRACTION, the one that
 * does not count is 0. The default of BUDGET_FRACTION is that of decode; that of prefill is 0.1.
 * KV_BAD_ARGUMENT (no such parameter). */
KV_API kv_status kv_strategy_get(const kv_strategy* strategy, uint32_t param, double* value,
                                 kv_error* error);

/* Sets the filter layers of "filter-layers", from 0, ascending. Full attention remains in the
 * layers before the first filter layer, in each filter layer, and in the layer after each. count 0:
 * the default, three layers spread evenly (one in eight if the model has fewer than 24). The
 * library copies `layers`. KV_BAD_ARGUMENT (another strategy; the order), KV_NO_MEMORY. The call
 * that receives the strategy returns KV_BAD_ARGUMENT for a layer that the model does not have. */
KV_API kv_status kv_strategy_set_layers(kv_strategy* strategy, const uint32_t* layers, size_t count,
                                        kv_error* error);

#define KV_STRATEGY_PREFILL 1u      /* kv_session_options.prefill takes it */
#define KV_STRATEGY_CACHE 2u        /* kv_cache_options.decode takes it */
#define KV_STRATEGY_INDEX 4u        /* it searches an index: kv_session_prepare */
#define KV_STRATEGY_EXPERIMENTAL 8u /* kvasir_experimental.h: it may disappear in any version */

/* Description of a strategy. */
typedef struct kv_strategy_info {
  uint32_t struct_size;  /* in */
  uint32_t flags;        /* KV_STRATEGY_* */
  uint64_t budget_floor; /* minimum tokens of the default BUDGET_FRACTION; 0: no budget */
  char name[32];         /* for kv_strategy_create */
} kv_strategy_info;

/* Fills *info for an index: 0, 1 and so on; KV_NOT_FOUND after the last. "auto" is not listed. Any
 * thread. */
KV_API kv_status kv_strategy_list(uint32_t index, kv_strategy_info* info, kv_error* error);

/* ==== 9 External engines ======================================================================
 *
 * A kv_cache is a KV cache for an engine that brings its own weights: the same int8 pages behind a
 * full-precision window, the same strategies, the same file.
 *
 *   for each step of 1 to 4096 tokens (a chunk of the prompt, or one token of the answer):
 *     for each layer:
 *       kv_cache_update(c, layer, KV_F16, k, v, NULL, tokens, &e);               keys after RoPE
 *       kv_cache_attention(c, layer, KV_F16, q, out, tokens, NULL, NULL, &e);    causal
 *
 * Arrays are contiguous rows of any alignment: k and v [tokens][kv_heads][head_dim], q and out
 * [tokens][heads][head_dim]. KV head h serves the query heads h * heads / kv_heads up to
 * (h + 1) * heads / kv_heads - 1.
 */
typedef struct kv_cache kv_cache;

/* Shape of a kv_cache. */
typedef struct kv_cache_shape {
  uint32_t struct_size;
  uint32_t layers;      /* 1 to 1024 */
  uint32_t heads;       /* query heads, 1 to 1024 */
  uint32_t kv_heads;    /* a divisor of heads */
  uint32_t head_dim;    /* 1 to 512 */
  uint32_t reserved;    /* 0 */
  uint64_t max_tokens;  /* 1 to 2^30; memory grows with the sequence */
  uint8_t identity[32]; /* of the caller's model, such as a hash of its weights; kv_cache_load
                         * compares it */
} kv_cache_shape;

/* Options of a kv_cache. The library copies them. */
typedef struct kv_cache_options {
  uint32_t struct_size;
  uint32_t threads;       /* as in kv_session_options */
  uint32_t window_tokens; /* as in kv_session_options */
  uint32_t precision;     /* kv_precision */
  /* Strategy of steps of one token; longer steps are exact. NULL: "auto". Or "full", "window",
   * "bounded", "quest", "flat", "dipr", "filter-layers"; others need a model: KV_BAD_ARGUMENT. With
   * "filter-layers", a layer cannot be attended before its filter layer: KV_BAD_STATE. */
  const kv_strategy* decode;
  /* As in kv_session_options, for the largest step so far. kv_cache_update refuses a step that does
   * not fit, before any change. The caller's arrays do not count. Nor does a workspace about as
   * large as the step's q, k and v. */
  uint64_t memory_limit;
  const char* spill_directory; /* as in kv_session_options */
} kv_cache_options;

/* Element type of the caller's arrays. */
typedef enum kv_number_type { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2 } kv_number_type;

/* Creates an empty cache. The caller closes *out with kv_cache_close.
 * KV_BAD_ARGUMENT (shape, options), KV_NO_MEMORY, KV_LIMIT (threads; memory_limit); KV_NOT_FOUND,
 * KV_PERMISSION, KV_NO_SPACE (spill_directory). */
KV_API kv_status kv_cache_open(const kv_cache_shape* shape, const kv_cache_options* options,
                               kv_cache** out, kv_error* error);

/* Destroys the cache. Forks keep the pages that they share with it. */
KV_API void kv_cache_close(kv_cache* cache);

/* Adds one layer's keys (after RoPE) and values of the step's tokens. `type` is a kv_number_type.
 * A step is complete when every layer has its update, in any order. The next update commits it and
 * begins a new step. `q` has the step's queries after RoPE. Strategies that do not need q allow
 * NULL. Time is linear in `tokens`: a step of 512 takes less than 100 ms, so the call accepts no
 * cancel token.
 * KV_BAD_ARGUMENT (layer, tokens; NaN, infinity, or a magnitude over 1e30), KV_BAD_STATE (the layer
 * has its update; the step has another number of tokens), KV_CONTEXT_FULL, KV_LIMIT (memory_limit;
 * message has the minimum), KV_BUSY. KV_NO_MEMORY, KV_CORRUPT (a damaged page of a mapped file),
 * KV_NO_SPACE, KV_IO (spill file): the cache is as before. But if the update begins a step, the
 * complete one can perhaps no longer be attended. */
KV_API kv_status kv_cache_update(kv_cache* cache, uint32_t layer, uint32_t type, const void* k,
                                 const void* v, const void* q, uint32_t tokens, kv_error* error);

/* Options of kv_cache_attention. */
typedef struct kv_cache_attention_options {
  uint32_t struct_size;
  uint32_t flags; /* 0 */
  float scale;    /* of q . k; 0: 1 / sqrt(head_dim) */
  float softcap;  /* scores become softcap * tanh(score / softcap), in slower code; strategies
                   * select by the uncapped scores; 0: off */
} kv_cache_attention_options;

/* Computes the attention of the step's queries in one layer. Attention is causal: query i attends
 * the tokens before the step and those of the step up to its own. The layer must have its update,
 * and `tokens` is the step's. A complete step can be attended until the next one begins, or until
 * kv_cache_truncate, kv_cache_fork or kv_cache_save. The window is exact but for rounding; pages
 * are int8.
 * "bounded", and "auto" from 4096 sealed tokens on, select by a sketch of the keys. The first
 * attention of a step of one token builds the sketch if it is missing or the sealed tokens have
 * doubled; this reads all pages. kv_cache_save and kv_cache_fork build it too. After a cancel the
 * next call builds it.
 * KV_BAD_ARGUMENT, KV_BAD_STATE (no update of this layer in the step; the step is over; its filter
 * layer has not been attended), KV_CANCELLED, KV_NO_MEMORY, KV_CORRUPT (a damaged page of a mapped
 * file), KV_IO (a page could not be read), KV_BUSY: cache and `out` are unchanged. */
KV_API kv_status kv_cache_attention(kv_cache* cache, uint32_t layer, uint32_t type, const void* q,
                                    void* out, uint32_t tokens,
                                    const kv_cache_attention_options* options,
                                    const kv_control* control, kv_error* error);

/* Truncates the cache to its first `tokens` tokens and drops an incomplete step. If `tokens` is the
 * number of tokens in complete steps, it only drops the incomplete step. Tokens that had left the
 * window return with the precision of their pages. A step that can still be attended has moved none
 * out of the window.
 * KV_BAD_ARGUMENT (there are fewer), KV_CORRUPT (a damaged page of a mapped file), KV_NO_MEMORY,
 * KV_BUSY. */
KV_API kv_status kv_cache_truncate(kv_cache* cache, uint64_t tokens, kv_error* error);

/* Creates an exact copy with the same options. Both share the pages; each has its own memory_limit.
 * A missing sketch is built first: kv_cache_attention. The caller closes *out with kv_cache_close.
 * KV_BAD_STATE (the step is incomplete), KV_CANCELLED, KV_NO_MEMORY, KV_LIMIT, KV_CORRUPT (a
 * damaged page of a mapped file, where a sketch is built), KV_BUSY. */
KV_API kv_status kv_cache_fork(kv_cache* cache, const kv_control* control, kv_cache** out,
                               kv_error* error);

/* Writes the cache to a file, as kv_save does. The kv_file_*, kv_pack and kv_unpack functions
 * accept the file. Progress: KV_PHASE_SAVE. KV_BAD_STATE (the step is incomplete), and the codes
 * of kv_save. */
KV_API kv_status kv_cache_save(kv_cache* cache, const char* path, const kv_control* control,
                               kv_error* error);

/* Creates a cache from a file by mapping it. window_tokens and precision come from the file.
 * control->flags: KV_VERIFY (progress: KV_PHASE_VERIFY). The caller closes *out with
 * kv_cache_close.
 * KV_MODEL_MISMATCH: another shape or identity. The number of query heads is not compared, because
 * a file does not have it. The call also refuses a session's file, and kv_load refuses a cache's:
 * nothing proves that the keys come from the same weights. KV_BAD_ARGUMENT (a full-precision file
 * with a memory_limit), and the codes of kv_load and kv_cache_open. */
KV_API kv_status kv_cache_load(const kv_cache_shape* shape, const char* path,
                               const kv_cache_options* options, const kv_control* control,
                               kv_cache** out, kv_error* error);

/* Creates a session over a cache that another engine has filled, also on another machine
 * (kv_cache_save, kv_cache_load). `tokens` are all tokens of the cache in order; `count` is their
 * number. The session shares the pages and may be saved with kv_save. The cache is unchanged.
 * Precision and window_tokens are the cache's. The caller closes *out with kv_session_close.
 * control->flags: KV_TOKENIZE_DOCUMENT if kv_tokenize made the tokens with it; questions then get
 * the turns of the chat format. Otherwise the session is as after kv_prefill_tokens.
 * Keys must equal those that the model file would produce: after RoPE, in the file's channel order.
 * GGUF files of the architecture "llama" interleave the halves that other formats rotate: channel i
 * of half h is channel 2 i + h.
 * The call prefills the unsealed tokens again, at most window_tokens and a page, because strategies
 * need their queries. It compares the keys. Weights of another precision pass. Another model, other
 * positions or another channel order are KV_MODEL_MISMATCH. Progress: KV_PHASE_PREFILL.
 * KV_BAD_ARGUMENT (count), KV_BAD_STATE (the step is incomplete), KV_UNSUPPORTED (a model with
 * latent attention, or one for kv_session_from_checkpoint),
 * KV_CONTEXT_FULL, KV_CANCELLED, KV_LIMIT (memory_limit), KV_CORRUPT (a damaged page of a mapped
 * file), KV_NO_MEMORY, KV_BUSY. */
KV_API kv_status kv_session_from_cache(kv_model* model, kv_cache* cache, const int32_t* tokens,
                                       size_t count, const kv_session_options* options,
                                       const kv_control* control, kv_session** out,
                                       kv_error* error);

/* Order of the numbers of a kv_layer_state. Channels and heads have the order of the model file.
 * Rows are the newest ones: as many as a query at the checkpoint sees besides itself, or more.
 * Before the first token the inputs of a convolution are zeros. */
typedef enum kv_state_layout {
  KV_STATE_KEYS = 0,      /* of a sliding window, after RoPE: [rows][kv_heads][head_dim] */
  KV_STATE_VALUES = 1,    /* likewise */
  KV_STATE_INPUTS = 2,    /* of a convolution: [channels][taps - 1], the newest last */
  KV_STATE_KEY_VALUE = 3, /* matrices of a gated delta net: [heads][key_dim][value_dim] */
  KV_STATE_VALUE_KEY = 4  /* matrices of Mamba-2: [heads][value_dim][key_dim] */
} kv_state_layout;

/* One array of a kv_checkpoint. The struct does not grow. */
typedef struct kv_layer_state {
  uint32_t layer;      /* of the model, from 0: N of the file's tensors blk.N */
  uint32_t layout;     /* kv_state_layout */
  uint32_t type;       /* kv_number_type */
  uint32_t reserved;   /* 0 */
  const void* numbers; /* contiguous, of any alignment */
  uint64_t count;      /* of numbers */
} kv_layer_state;

/* What layers with a sliding window and recurrent layers keep after a sequence's first `tokens`
 * tokens. The library reads the arrays during the call only. */
typedef struct kv_checkpoint {
  uint32_t struct_size;
  uint32_t count;               /* of `states`, at most 65536 */
  uint64_t tokens;              /* 1 or more */
  const kv_layer_state* states; /* KEYS and VALUES of each layer with a window; INPUTS of each
                                 * recurrent layer, and its matrices if it has any; in any order */
} kv_checkpoint;

/* Creates a session as kv_session_from_cache does, of a model with sliding windows or recurrent
 * layers. The cache has the layers that attend to all tokens, in their order.
 * from: a checkpoint of an earlier token. The call prefills the tokens from there on again, and
 * compares keys and values of the newest ones. Some hundred tokens are enough where the rows of
 * windows begin at the first token; elsewhere 17 pages and window_tokens are.
 * end: NULL, or a checkpoint of all tokens, with which the call compares what it computed. With
 * KV_CACHE_UNCHECKED it does not read it. Without it nothing proves the states of layers behind the
 * last one that attends to all tokens.
 * Other parameters, rules and codes: kv_session_from_cache. KV_BAD_ARGUMENT also: a checkpoint
 * whose layers, layouts or counts are not the model's, or with NaN, infinity or a magnitude over
 * 1e30; `from` too near to the end (the message has the largest from->tokens); a model without such
 * layers.
 */
KV_API kv_status kv_session_from_checkpoint(kv_model* model, kv_cache* cache,
                                            const kv_checkpoint* from, const kv_checkpoint* end,
                                            const int32_t* tokens, size_t count,
                                            const kv_session_options* options,
                                            const kv_control* control, kv_session** out,
                                            kv_error* error);

/* State of a cache. The counts of attention are sums over all calls so far. */
typedef struct kv_cache_stats {
  uint32_t struct_size;     /* in */
  uint32_t threads;         /* including the caller's */
  uint64_t tokens;          /* of complete steps */
  uint64_t max_tokens;      /* of the shape */
  uint64_t sealed_tokens;   /* in pages */
  uint32_t page_tokens;     /* tokens per page */
  uint32_t sink_tokens;     /* first tokens, always attended */
  uint32_t window_tokens;   /* newest tokens, not sealed */
  uint32_t step_tokens;     /* of the current step */
  uint64_t private_bytes;   /* as in kv_session_stats */
  uint64_t mapped_bytes;    /* in the loaded file */
  uint64_t spilled_bytes;   /* in the spill file */
  uint64_t memory_limit;    /* 0: none */
  uint64_t budget_tokens;   /* mean per layer and head */
  uint64_t tokens_read;     /* as in kv_answer */
  uint64_t tokens_present;  /* the same sum for full attention */
  uint64_t pages_touched;   /* pages read */
  char decode_strategy[32]; /* chosen for the next token; "auto" is resolved */
} kv_cache_stats;

/* Fills *stats. KV_BUSY. */
KV_API kv_status kv_cache_get_stats(kv_cache* cache, kv_cache_stats* stats, kv_error* error);

/* Writes JSON for people, as kv_session_stats_json does, with the same codes. */
KV_API kv_status kv_cache_stats_json(kv_cache* cache, char* json, size_t capacity, size_t* size,
                                     kv_error* error);

#ifdef __cplusplus
}
#endif
#endif /* KVASIR_H */
