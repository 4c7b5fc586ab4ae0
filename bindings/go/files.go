package kvasir

// #include "bridge.h"
import "C"

import "context"

// FileInfo is what a cache file says of itself.
type FileInfo struct {
	FormatVersion uint32
	FileBytes     uint64
	Tokens        uint64
	SealedTokens  uint64
	KVBytes       uint64 // pages, scales and summaries
	Layers        uint32
	KVHeads       uint32
	HeadDim       uint32
	KVType        KVType
	ModelName     string
	ChatFormat    string // of its turns; empty: it has none, or an older library wrote it
}

// InspectFile checks a cache file's header and its sequence's facts only. A packed document is ErrNotACache: InspectPacked.
func InspectFile(path string) (FileInfo, error) {
	info := C.kv_file_information{struct_size: C.sizeof_kv_file_information}
	err := short(path, func(file *C.char, e *C.kv_error) C.kv_status { return C.kv_file_inspect(file, &info, e) })
	return FileInfo{
		FormatVersion: uint32(info.format_version),
		FileBytes:     uint64(info.file_bytes),
		Tokens:        uint64(info.tokens),
		SealedTokens:  uint64(info.sealed_tokens),
		KVBytes:       uint64(info.kv_bytes),
		Layers:        uint32(info.layers),
		KVHeads:       uint32(info.kv_heads),
		HeadDim:       uint32(info.head_dim),
		KVType:        KVType(info.kv_type),
		ModelName:     text(info.model_name[:]),
		ChatFormat:    text(info.chat_format[:]),
	}, err
}

// PackedInfo is what a packed document says of itself.
type PackedInfo struct {
	PackedVersion uint32
	FileBytes     uint64
	DocumentBytes uint64 // when it is unpacked
	Tokens        uint64
	FormatVersion uint32 // of the document
	Level         uint32
	Layers        uint32
	KVHeads       uint32
	HeadDim       uint32
	ModelName     string
}

// InspectPacked checks header and size of a packed document only. ErrNotACache when it is something else.
func InspectPacked(path string) (PackedInfo, error) {
	info := C.kv_packed_information{struct_size: C.sizeof_kv_packed_information}
	err := short(path, func(file *C.char, e *C.kv_error) C.kv_status { return C.kv_packed_inspect(file, &info, e) })
	return PackedInfo{
		PackedVersion: uint32(info.packed_version),
		FileBytes:     uint64(info.file_bytes),
		DocumentBytes: uint64(info.document_bytes),
		Tokens:        uint64(info.tokens),
		FormatVersion: uint32(info.format_version),
		Level:         uint32(info.level),
		Layers:        uint32(info.layers),
		KVHeads:       uint32(info.kv_heads),
		HeadDim:       uint32(info.head_dim),
		ModelName:     text(info.model_name[:]),
	}, err
}

// VerifyFile reads and checks every byte of a cache file. ErrCorrupt names section and offset. progress may be nil.
func VerifyFile(ctx context.Context, path string, progress ProgressFunc) error {
	return long(ctx, progress, path, "", func(c *call, file, _ *C.char) C.kv_status {
		return C.kv_file_verify(file, c.options(0), &c.e)
	})
}

// PackOptions are for Pack.
type PackOptions struct {
	Level    uint32 // of compression, 1 to 19: slower and a little smaller; 0: 1
	Progress ProgressFunc
}

// Pack makes a smaller copy of a saved sequence, for sending or keeping away: about 85% of its size. It cannot be loaded before Unpack has
// restored it, bit for bit. packed is replaced atomically: after a failure it is as it was. options may be nil.
// ErrBadArgument (a level out of its range, both paths lead to one file), ErrNotFound, ErrNotACache, ErrVersion, ErrCorrupt (header or tables;
// VerifyFile checks the rest), ErrCancelled, ErrNoSpace, ErrPermission, ErrIO, ErrNoMemory.
func Pack(ctx context.Context, path, packed string, options *PackOptions) error {
	if options == nil {
		options = &PackOptions{}
	}
	return long(ctx, options.Progress, path, packed, func(c *call, from, to *C.char) C.kv_status {
		return C.kv_pack(from, to, c.packing(C.uint32_t(options.Level)), &c.e)
	})
}

// Unpack restores at path what Pack packed; errors likewise. ErrCorrupt when anything in the file is not as it was written. progress may be nil.
func Unpack(ctx context.Context, packed, path string, progress ProgressFunc) error {
	return long(ctx, progress, packed, path, func(c *call, from, to *C.char) C.kv_status {
		return C.kv_unpack(from, to, c.packing(0), &c.e)
	})
}

func (c *call) packing(level C.uint32_t) *C.kv_pack_options {
	o := defaults(func(o *C.kv_pack_options, size C.size_t) { C.kv_pack_options_init(o, size) })
	o.level, o.cancel = level, c.cancel
	o.progress, o.progress_user = c.reports()
	return o
}

// short is a call about a file, without a handle.
func short(path string, ask func(file *C.char, e *C.kv_error) C.kv_status) error {
	var memory memory
	defer memory.free()
	file := memory.path("path", path)
	if memory.err != nil {
		return memory.err
	}
	var e C.kv_error
	return newError(ask(file, &e), &e)
}

// long is one that can be cancelled and tells its progress, about one or two files.
func long(ctx context.Context, progress ProgressFunc, path, other string, ask func(c *call, file, other *C.char) C.kv_status) (err error) {
	defer raise(&err)
	var memory memory
	defer memory.free()
	first, second := memory.path("path", path), memory.path("path", other)
	if memory.err != nil {
		return memory.err
	}
	c, err := begin(ctx, nil, progress)
	if err != nil {
		return err
	}
	return c.end(&handle{}, ask(c, first, second))
}
