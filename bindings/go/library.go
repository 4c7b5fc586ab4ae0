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

// Library is a folder of cache files that finds earlier prefills. A text is prefilled once; of a
// text that begins like another only the rest is prefilled. Any number of processes and goroutines
// may use one folder at once.
//
// NAME.kv in the folder is the document NAME, an ordinary file of Session.Save, which the user may
// copy in. A document that a session maps, in any process, is neither evicted nor removed.
type Library struct {
	handle
	ptr     *C.kv_library
	listing sync.Mutex // kv_library_list lists one entry per call: one listing at a time
}

// LibraryOptions are the options of OpenLibrary.
type LibraryOptions struct {
	// MaxBytes limits the bytes of all documents; 0: no limit. A save and OpenLibrary evict the
	// least recently used documents.
	MaxBytes int64
	Log      LogFunc // evictions, and documents that cannot be used; nil: silent
}

// OpenLibrary opens the folder, and creates it where it does not exist, but not its parents.
// options may be nil.
// ErrNotFound, ErrPermission, ErrIO, ErrBusy (another process has been changing the library for 10
// seconds), ErrNoMemory.
func OpenLibrary(folder string, options *LibraryOptions) (l *Library, err error) {
	defer raise(&err)
	if options == nil {
		options = &LibraryOptions{}
	}
	var a arguments
	defer a.free()
	l = &Library{}
	o := sized[C.kv_library_options]()
	o.max_bytes = a.u64("MaxBytes", options.MaxBytes)
	path := a.path("the folder", folder)
	if a.err != nil {
		return nil, a.err
	}
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

// Close releases the library after the running calls on it have returned. Its sessions stay usable.
func (l *Library) Close() error { return l.close() }

// LibraryDocument is a document of a library.
type LibraryDocument struct {
	Name string
	// Err is nil, or the Status why the file cannot be used: ErrCorrupt, ErrVersion, ErrNotACache
	// and others. Tokens is then 0, and ModelName and Fingerprint are empty.
	Err         error
	FileBytes   int64
	Tokens      int // of the sequence
	LastUsed    time.Time
	ModelName   string // of the model that wrote it
	Fingerprint string // as ModelInfo.Fingerprint
}

// Documents lists the documents, the most recently used first.
// ErrIO, ErrPermission, ErrNotFound (the folder is gone), ErrNoMemory.
func (l *Library) Documents() (documents []LibraryDocument, err error) {
	defer raise(&err)
	if err := l.enter(); err != nil {
		return nil, err
	}
	defer l.leave()
	l.listing.Lock()
	defer l.listing.Unlock()
	for index := C.uint32_t(0); ; index++ {
		document := sized[C.kv_library_document]()
		var e C.kv_error
		err := l.result(C.kv_library_list(l.ptr, index, document, &e), &e)
		if errors.Is(err, ErrNotFound) && e.sys_errno == 0 {
			return documents, nil
		}
		if err != nil {
			return nil, err
		}
		documents = append(documents, LibraryDocument{
			Name:        text(document.name[:]),
			Err:         Status(document.status).err(),
			FileBytes:   int64(document.file_bytes),
			Tokens:      int(document.tokens),
			LastUsed:    time.Unix(0, int64(document.last_used)),
			ModelName:   text(document.model_name[:]),
			Fingerprint: text(document.fingerprint[:]),
		})
	}
}

// LibrarySessionOptions are the options of Library.Session.
type LibrarySessionOptions struct {
	Name     string          // of the saved document; made unique if it exists; "": a hash
	Replace  bool            // replace a document of that name, whatever it holds
	Session  *SessionOptions // nil: the defaults
	Special  bool            // text that spells a control token becomes that token
	Verify   bool            // verify a whole document now, not each page at its first use
	Progress ProgressFunc    // PhaseVerify, PhasePrefill, PhasePrepare, PhaseSave
}

// LibraryResult is what Library.Session found and saved.
type LibraryResult struct {
	SaveErr     error  // nil, or the Status why the prefill is not in the library
	Tokens      int    // of the text
	TokensFound int    // the first of these, found in a document
	Saved       bool   // saved by this call
	Name        string // of the document found or saved
}

// Session makes a session whose sequence is the text, as after Prefill. It maps the document that
// has the longest common prefix, prefills the rest and saves the result. A document qualifies if
// model, chat format, Window, Precision and prefill strategy are the same. If it has the whole
// text, nothing is saved. A failed or cancelled save is no failure of this call:
// LibraryResult.SaveErr. options may be nil.
// ErrBadArgument (also an empty text), ErrCancelled (nothing was saved; the prefill is lost),
// ErrContextFull, ErrNoMemory, ErrIO, and the errors of NewSession.
func (l *Library) Session(ctx context.Context, model *Model, text string,
	options *LibrarySessionOptions) (s *Session, result LibraryResult, err error) {
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
	var a arguments
	defer a.free()
	o := sized[C.kv_library_session_options]()
	o.flags = flag(options.Special, C.KV_TOKENIZE_SPECIAL) | flag(options.Verify, C.KV_VERIFY) |
		flag(options.Replace, C.KV_REPLACE)
	o.name = a.option("Name", options.Name)
	s = &Session{}
	session, err := s.options(options.Session, &a)
	if err != nil {
		return nil, result, err
	}
	c, err := begin(ctx, nil, options.Progress)
	if err != nil {
		s.forget()
		return nil, result, err
	}
	r := sized[C.kv_library_result]()
	bytes, size := bytesOf(text)
	status := C.kvasir_go_library_session(l.ptr, model.ptr, bytes, size, o, session, c.control(0),
		&s.ptr, r, &c.e)
	s.inherit(&l.handle, &model.handle)
	s, err = s.adopt(model.ptr, c.end(&s.handle, status))
	return s, newLibraryResult(r), err
}

// Rename renames a document, durably.
// ErrNotFound, ErrBadState (a document or a file has the new name), ErrBadArgument (no document can
// have the name), ErrIO, ErrPermission, ErrBusy (as OpenLibrary).
func (l *Library) Rename(from, to string) error {
	return l.change(from, to, func(first, second *C.char, e *C.kv_error) C.kv_status {
		return C.kv_library_rename(l.ptr, first, second, e)
	})
}

// Remove removes a document, durably.
// ErrNotFound, ErrBusy (a session maps it, or as OpenLibrary), ErrIO, ErrPermission.
func (l *Library) Remove(name string) error {
	return l.change(name, "", func(first, _ *C.char, e *C.kv_error) C.kv_status {
		return C.kv_library_remove(l.ptr, first, e)
	})
}

func (l *Library) change(name, other string,
	run func(name, other *C.char, e *C.kv_error) C.kv_status) error {
	var a arguments
	defer a.free()
	first, second := a.path("the name", name), a.path("the name", other)
	if a.err != nil {
		return a.err
	}
	return l.do(func(e *C.kv_error) C.kv_status { return run(first, second, e) })
}

func newLibraryResult(r *C.kv_library_result) LibraryResult {
	return LibraryResult{
		SaveErr:     Status(r.save_status).err(),
		Tokens:      int(r.tokens),
		TokensFound: int(r.tokens_found),
		Saved:       r.saved != 0,
		Name:        text(r.name[:]),
	}
}
