package kvasir

// #include "bridge.h"
import "C"

import "context"

// FileInfo describes a cache file.
type FileInfo struct {
	FormatVersion int // docs/file-format.md
	FileBytes     int64
	Tokens        int   // of the sequence
	SealedTokens  int   // the first of these, in pages
	KVBytes       int64 // pages, scales and page summaries
	Layers        int
	KVHeads       int // per layer
	HeadDim       int // elements per head
	Precision     Precision
	ModelName     string // of the model that wrote it
	ChatFormat    string // of its turns; "": none, or written by an older library

	RecurrentLayers int   // layers with a state; 0: none
	States          int   // that the file has: of the end, and of checkpoints before it
	StateBytes      int64 // of all of them

	Checkpoints []int // tokens before each earlier position at which windows and states can go on
	MTPTokens   int   // whose keys and values of the MTP layer it has; 0: saved without drafts
	Documents   int   // of a composed session, to which it refers: FileDocuments; 0: none
}

// InspectFile describes a cache file. It verifies header and tables only.
// ErrNotACache (also a packed file: InspectPacked), ErrNotFound, ErrPermission, ErrIO, ErrVersion,
// ErrCorrupt, ErrNoMemory.
func InspectFile(path string) (FileInfo, error) {
	info := sized[C.kv_file_info]()
	err := short(path, func(file *C.char, e *C.kv_error) C.kv_status {
		return C.kv_file_inspect(file, info, e)
	})
	var checkpoints []int
	for _, tokens := range info.checkpoint_tokens[:info.checkpoints] {
		checkpoints = append(checkpoints, int(tokens))
	}
	return FileInfo{
		FormatVersion: int(info.format_version),
		FileBytes:     int64(info.file_bytes),
		Tokens:        int(info.tokens),
		SealedTokens:  int(info.sealed_tokens),
		KVBytes:       int64(info.kv_bytes),
		Layers:        int(info.layers),
		KVHeads:       int(info.kv_heads),
		HeadDim:       int(info.head_dim),
		Precision:     Precision(info.precision),
		ModelName:     text(info.model_name[:]),
		ChatFormat:    text(info.chat_format[:]),

		RecurrentLayers: int(info.recurrent_layers),
		States:          int(info.states),
		StateBytes:      int64(info.state_bytes),

		Checkpoints: checkpoints,
		MTPTokens:   int(info.mtp_tokens),
		Documents:   int(info.documents),
	}, err
}

// FileDocument is a document to which a file of a composed session refers.
type FileDocument struct {
	Path      string // where it must be
	Tokens    int    // of the document
	FileBytes int64  // of its file when it was mapped
	// Err is nil, or the Status why the session cannot be loaded: ErrNotFound (the document is
	// missing), ErrModelMismatch (it has changed) and others.
	Err       error
	Candidate bool // answers may attend it
	Attended  bool // by the last answer
}

// FileDocuments lists the documents to which a file refers. It verifies the headers of their files.
// The errors of InspectFile.
func FileDocuments(path string) (documents []FileDocument, err error) {
	info, err := InspectFile(path)
	for index := 0; err == nil && index < info.Documents; index++ {
		document := sized[C.kv_file_document]()
		err = short(path, func(file *C.char, e *C.kv_error) C.kv_status {
			return C.kv_file_get_document(file, C.uint32_t(index), document, e)
		})
		documents = append(documents, FileDocument{
			Path:      text(document.path[:]),
			Tokens:    int(document.tokens),
			FileBytes: int64(document.file_bytes),
			Err:       Status(document.status).err(),
			Candidate: document.flags&C.KV_DOCUMENT_CANDIDATE != 0,
			Attended:  document.flags&C.KV_DOCUMENT_ATTENDED != 0,
		})
	}
	if err != nil {
		return nil, err
	}
	return documents, nil
}

// PackedInfo describes a packed file.
type PackedInfo struct {
	PackedVersion int   // docs/file-format.md
	FileBytes     int64 // packed
	DocumentBytes int64 // unpacked
	Tokens        int   // of the sequence
	FormatVersion int   // of the unpacked file
	Level         int   // of compression
	Layers        int
	KVHeads       int    // per layer
	HeadDim       int    // elements per head
	ModelName     string // of the model that wrote it
}

// InspectPacked describes a packed file. It verifies its header and size only.
// ErrNotACache (another kind of file), and the errors of InspectFile.
func InspectPacked(path string) (PackedInfo, error) {
	info := sized[C.kv_packed_info]()
	err := short(path, func(file *C.char, e *C.kv_error) C.kv_status {
		return C.kv_packed_inspect(file, info, e)
	})
	return PackedInfo{
		PackedVersion: int(info.packed_version),
		FileBytes:     int64(info.file_bytes),
		DocumentBytes: int64(info.document_bytes),
		Tokens:        int(info.tokens),
		FormatVersion: int(info.format_version),
		Level:         int(info.level),
		Layers:        int(info.layers),
		KVHeads:       int(info.kv_heads),
		HeadDim:       int(info.head_dim),
		ModelName:     text(info.model_name[:]),
	}, err
}

// VerifyFile reads and verifies every byte of a cache file. progress may be nil.
// ErrCorrupt names section and offset; ErrCancelled, and the errors of InspectFile.
func VerifyFile(ctx context.Context, path string, progress ProgressFunc) error {
	return long(ctx, progress, path, "", func(c *call, file, _ *C.char) C.kv_status {
		return C.kv_file_verify(file, c.control(0), &c.e)
	})
}

// PackOptions are the options of Pack.
type PackOptions struct {
	Level    int // of compression, 1 to 19: slower and slightly smaller; 0: 1
	Progress ProgressFunc
}

// Pack writes a packed copy of a cache file, about 85% of its size, to send or archive. Unpack
// restores it bit for bit; a packed file cannot be loaded. packed is replaced atomically; after a
// failure it is as before. options may be nil.
// ErrBadArgument (level; both paths are one file), ErrNotFound, ErrNotACache, ErrVersion,
// ErrCorrupt (header or tables; VerifyFile checks the rest), ErrCancelled, ErrNoSpace,
// ErrPermission, ErrIO,
// ErrNoMemory.
func Pack(ctx context.Context, path, packed string, options *PackOptions) error {
	if options == nil {
		options = &PackOptions{}
	}
	var a arguments
	level := a.u32("Level", options.Level)
	if a.err != nil {
		return a.err
	}
	return long(ctx, options.Progress, path, packed, func(c *call, from, to *C.char) C.kv_status {
		return C.kv_pack(from, to, level, c.control(0), &c.e)
	})
}

// Unpack restores at path the cache file that Pack packed. progress may be nil.
// ErrCorrupt (any byte differs from what was written), and the errors of Pack.
func Unpack(ctx context.Context, packed, path string, progress ProgressFunc) error {
	return long(ctx, progress, packed, path, func(c *call, from, to *C.char) C.kv_status {
		return C.kv_unpack(from, to, c.control(0), &c.e)
	})
}

// short runs a call about a file, without a handle or a context.
func short(path string, run func(file *C.char, e *C.kv_error) C.kv_status) error {
	var a arguments
	defer a.free()
	file := a.path("the path", path)
	if a.err != nil {
		return a.err
	}
	var e C.kv_error
	return newError(run(file, &e), &e)
}

// long runs a call about one or two files that has a context and reports progress.
func long(ctx context.Context, progress ProgressFunc, path, other string,
	run func(c *call, file, other *C.char) C.kv_status) (err error) {
	defer raise(&err)
	var a arguments
	defer a.free()
	first, second := a.path("the path", path), a.path("the path", other)
	if a.err != nil {
		return a.err
	}
	c, err := begin(ctx, nil, progress)
	if err != nil {
		return err
	}
	return c.end(&handle{}, run(c, first, second))
}
