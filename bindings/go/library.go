package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"time"
)

// Library is a folder of saved documents that finds by itself what was read before: every text is read once, and of a text that begins
// like another only the rest. Any number of processes and goroutines may use one folder at once. NAME.kv in the folder is the document of that
// name, an ordinary file of Session.Save; files put there are documents like the others. A document that a session has open, in any process,
// is neither evicted nor removed.
type Library struct {
	handle
	ptr     *C.kv_library
	listing sync.Mutex // a list is asked for one by one, and another one's beginning would come in between
}

// LibraryOptions are for OpenLibrary.
type LibraryOptions struct {
	// Bytes of all documents together: for a save and in OpenLibrary the least recently used ones go; 0: no limit.
	MostBytes uint64
	Log       LogFunc // evictions, documents that cannot be used; nil: silent
}

// OpenLibrary makes the folder where there is none (not those above it). options may be nil.
// ErrNotFound, ErrPermission, ErrIO, ErrBusy (another process has been changing the library for 10 seconds), ErrNoMemory.
func OpenLibrary(folder string, options *LibraryOptions) (l *Library, err error) {
	defer raise(&err)
	if options == nil {
		options = &LibraryOptions{}
	}
	var memory memory
	defer memory.free()
	path := memory.path("folder", folder)
	if memory.err != nil {
		return nil, memory.err
	}
	l = &Library{}
	o := defaults(func(o *C.kv_library_options, size C.size_t) { C.kv_library_options_init(o, size) })
	o.max_bytes = C.uint64_t(options.MostBytes)
	if o.log, o.log_user, err = l.newLogger(options.Log); err != nil {
		return nil, err
	}
	var e C.kv_error
	if err := l.result(C.kv_library_open(path, o, &l.ptr, &e), &e); err != nil {
		C.kv_library_close(l.ptr)
		l.forget()
		return nil, err
	}
	ptr := l.ptr
	l.opened("library", func() { C.kv_library_close(ptr) })
	runtime.SetFinalizer(l, (*Library).Close)
	return l, nil
}

// Close releases the library when the calls that run on it have returned. Sessions from it stay usable.
func (l *Library) Close() error { return l.close() }

// LibraryDocument is one document of a library.
type LibraryDocument struct {
	Name        string
	Err         error // nil, or the Status for which the file cannot be used: ErrCorrupt, ErrVersion, ErrNotACache and others; then it has no tokens
	FileBytes   uint64
	Tokens      uint64
	LastUsed    time.Time
	ModelName   string
	Fingerprint string // of the model's weights, as in ModelInfo
}

// Documents lists what is in the folder, the last used first. ErrIO, ErrPermission, ErrNoMemory.
func (l *Library) Documents() (documents []LibraryDocument, err error) {
	defer raise(&err)
	if err := l.enter(); err != nil {
		return nil, err
	}
	defer l.leave()
	l.listing.Lock()
	defer l.listing.Unlock()
	for index := C.uint32_t(0); ; index++ {
		document := C.kv_library_document{struct_size: C.sizeof_kv_library_document}
		var e C.kv_error
		err := l.result(C.kv_library_list(l.ptr, index, &document, &e), &e)
		if errors.Is(err, ErrNotFound) {
			return documents, nil
		}
		if err != nil {
			return nil, err
		}
		documents = append(documents, LibraryDocument{
			Name:        text(document.name[:]),
			Err:         Status(document.status).err(),
			FileBytes:   uint64(document.file_bytes),
			Tokens:      uint64(document.tokens),
			LastUsed:    time.Unix(0, int64(document.last_used)),
			ModelName:   text(document.model_name[:]),
			Fingerprint: text(document.fingerprint[:]),
		})
	}
}

// LibrarySessionOptions are for Library.Session.
type LibrarySessionOptions struct {
	Name     string          // of the document that is saved: 1 to 200 bytes without slashes; with an ending if taken; "": a hash
	Replace  bool            // the document that has the name is replaced, whatever it holds
	Session  *SessionOptions // nil: the defaults
	Special  bool            // text that spells a control token becomes that token; false: it is text
	Verify   bool            // check all of a document before it is used, not each part when it is first used
	Progress ProgressFunc    // PhaseVerify, PhasePrefill, PhasePrepare, PhaseSave
}

// LibraryResult is what Library.Session found and saved.
type LibraryResult struct {
	SaveErr     error  // nil, or the Status for which what was read is not in the library though the session is there
	Tokens      uint64 // of the text
	TokensFound uint64 // the first ones of these, that a document had
	Saved       bool   // what was read is now in the library; false: it was there, or SaveErr says why not
	Name        string // of the document that was found, or saved
}

// Session makes a session that has read the text as Prefill reads it. The document that has most of its tokens at its beginning, read by the same
// model in the same way, is mapped; the rest is read and the result saved. Where all is found nothing is saved. A failure to save, or a
// context that is done while saving, is not a failure of this call: SaveErr. options may be nil.
// ErrBadArgument (also an empty text), ErrCancelled (nothing was saved; what was read is lost), ErrContextFull, ErrNoMemory, ErrIO.
func (l *Library) Session(ctx context.Context, model *Model, text string, options *LibrarySessionOptions) (s *Session, result LibraryResult, err error) {
	defer raise(&err)
	if model == nil {
		return nil, result, failure(ErrBadArgument, "the model is nil")
	}
	if err := l.enter(); err != nil {
		return nil, result, err
	}
	defer l.leave()
	if err := model.enter(); err != nil {
		return nil, result, err
	}
	defer model.leave()
	if options == nil {
		options = &LibrarySessionOptions{}
	}
	var memory memory
	defer memory.free()
	o := defaults(func(o *C.kv_library_session_options, size C.size_t) { C.kv_library_session_options_init(o, size) })
	if options.Special {
		o.flags |= C.KV_TOKENIZE_SPECIAL
	}
	if options.Verify {
		o.flags |= C.KV_LIBRARY_VERIFY
	}
	if options.Replace {
		o.flags |= C.KV_LIBRARY_REPLACE
	}
	o.name = memory.option("name", options.Name)
	s = &Session{}
	session, err := s.options(options.Session, &memory)
	if err != nil {
		return nil, result, err
	}
	c, err := begin(ctx, nil, options.Progress)
	if err != nil {
		s.forget()
		return nil, result, err
	}
	o.cancel = c.cancel
	o.progress, o.progress_user = c.reports()
	r := C.kv_library_result{struct_size: C.sizeof_kv_library_result}
	bytes, size := bytesOf(text)
	status := C.kvasir_go_library_session(l.ptr, model.ptr, bytes, size, o, session, &s.ptr, &r, &c.e)
	s.inherit(&l.handle, &model.handle)
	s, err = s.adopt(model.ptr, c.end(&s.handle, status))
	return s, newLibraryResult(&r), err
}

// Rename changes a document's name. Durable when it returns nil. ErrNotFound, ErrBadState (there is a document of the new name), ErrBusy as
// OpenLibrary.
func (l *Library) Rename(from, to string) error {
	return l.change(from, to, func(first, second *C.char, e *C.kv_error) C.kv_status {
		return C.kv_library_rename(l.ptr, first, second, e)
	})
}

// Remove removes a document. Durable when it returns nil. ErrNotFound, ErrBusy (a session has it open, or as OpenLibrary).
func (l *Library) Remove(name string) error {
	return l.change(name, "", func(first, _ *C.char, e *C.kv_error) C.kv_status {
		return C.kv_library_remove(l.ptr, first, e)
	})
}

func (l *Library) change(name, other string, ask func(name, other *C.char, e *C.kv_error) C.kv_status) (err error) {
	defer raise(&err)
	if err := l.enter(); err != nil {
		return err
	}
	defer l.leave()
	var memory memory
	defer memory.free()
	first, second := memory.path("name", name), memory.path("name", other)
	if memory.err != nil {
		return memory.err
	}
	var e C.kv_error
	return l.result(ask(first, second, &e), &e)
}

func newLibraryResult(r *C.kv_library_result) LibraryResult {
	return LibraryResult{
		SaveErr:     Status(r.save_status).err(),
		Tokens:      uint64(r.tokens),
		TokensFound: uint64(r.tokens_found),
		Saved:       r.saved != 0,
		Name:        text(r.name[:]),
	}
}
