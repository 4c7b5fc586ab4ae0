package kvasir

// #include "bridge.h"
import "C"

// Precision is how the KV cache is stored.
type Precision uint32

const (
	PrecisionInt8 Precision = C.KV_PRECISION_INT8 // int8 pages behind a full-precision window
	// PrecisionF32 is float32 throughout with full attention: the reference, 7 times the memory.
	PrecisionF32 Precision = C.KV_PRECISION_F32
)

// String returns the precision's name.
func (p Precision) String() string { return name(p, "Precision", precisionNames) }

var precisionNames = map[Precision]string{PrecisionInt8: "int8", PrecisionF32: "f32"}

// SessionOptions are the options of a session. The zero value is the default.
type SessionOptions struct {
	Threads      int // including the caller's; 0: one per CPU of the process
	Context      int // maximum tokens; 0: the model's, which is also the largest value
	Window       int // newest tokens in full precision, always attended; 0: 64
	PrefillChunk int // tokens per prefill step, 1 to 4096; 0: chosen
	Precision    Precision
	Decode       *Strategy // nil: "auto". PrecisionF32 attends everything regardless
	Prefill      *Strategy // nil: "full", exact attention
	// MemoryLimit is the bytes of host memory for the KV cache and everything stored with it; 0: no
	// limit. Pages beyond it go to an unnamed file in SpillDirectory, or stay in the loaded file.
	// Answers are the same, bit for bit. A limit that is too small is ErrLimit before any work, and
	// the message has the minimum. PrecisionF32 with a limit is ErrBadArgument.
	MemoryLimit    int64
	SpillDirectory string // on a local disk; "": /var/tmp
	// Instructions are the system text before the document. The first Prefill or Generate of an
	// empty sequence places them at the start of the chat format's first turn. For Load, "" means
	// the file's; another text is ErrModelMismatch.
	Instructions string
	// DraftTokens are drafted by the model's MTP layer for each step of an answer, 1 to 3; 0: none.
	// Answers are the same, bit for bit. ErrUnsupported unless ModelInfo.MTPLayers.
	DraftTokens int
	NoLookup    bool    // answers, which are the same, have no drafts from the sequence's own text
	Log         LogFunc // nil: silent
}

// options converts the options of a session; nil to NULL. The session holds their log function,
// arguments the rest.
func (s *Session) options(from *SessionOptions, a *arguments) (*C.kv_session_options, error) {
	if from == nil || a.err != nil {
		return nil, a.err
	}
	o := sized[C.kv_session_options]()
	o.threads = a.u32("Threads", from.Threads)
	o.context_tokens = a.u64("Context", int64(from.Context))
	o.window_tokens = a.u32("Window", from.Window)
	o.prefill_chunk = a.u32("PrefillChunk", from.PrefillChunk)
	o.precision = C.uint32_t(from.Precision)
	o.decode = a.strategy(from.Decode)
	o.prefill = a.strategy(from.Prefill)
	o.memory_limit = a.u64("MemoryLimit", from.MemoryLimit)
	o.spill_directory = a.option("SpillDirectory", from.SpillDirectory)
	o.instructions = a.option("Instructions", from.Instructions)
	o.draft_tokens = a.u32("DraftTokens", from.DraftTokens)
	o.flags = flag(from.NoLookup, C.KV_NO_LOOKUP)
	if a.err != nil {
		return nil, a.err
	}
	var err error
	o.log, o.log_user, err = s.newLogger(from.Log)
	return o, err
}

// Sampling is how a token is sampled. The zero value is greedy: the most likely token.
type Sampling struct {
	Temperature       float32 // 0: greedy
	TopK              int     // 0: off
	TopP              float32 // 0 or 1: off
	MinP              float32 // 0: off
	RepetitionPenalty float32 // over the last 256 tokens; 0 or 1: off
	Seed              uint64  // the same seed and input have the same answer; GPUs: docs/gpu.md
}

func (s *Sampling) options(a *arguments) *C.kv_generate_options {
	o := sized[C.kv_generate_options]()
	o.temperature = C.float(s.Temperature)
	o.top_k = a.u32("TopK", s.TopK)
	o.top_p = C.float(s.TopP)
	o.min_p = C.float(s.MinP)
	o.repetition_penalty = C.float(s.RepetitionPenalty)
	o.seed = C.uint64_t(s.Seed)
	return o
}
