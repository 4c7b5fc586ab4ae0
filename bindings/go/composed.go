package kvasir

// #include "bridge.h"
import "C"

import (
	"context"
	"unsafe"
)

// ComposeOptions are the options of Model.Compose and Library.Compose.
type ComposeOptions struct {
	// MaxDocuments are the documents that an answer attends; 0: up to 8. At least as many as there
	// are documents: all, without a choice, if they fit.
	MaxDocuments int
	Session      *SessionOptions // nil: the defaults
}

// ComposedDocument is a document of a composed session.
type ComposedDocument struct {
	Path      string
	Tokens    int
	Candidate bool    // answers may attend it
	Attended  bool    // by the last answer
	Score     float64 // share of the last question's scores, 0 to 1; -1: it was not scored
}

// Compose makes a session over several cache files by mapping them; nothing is prefilled again.
// Answers attend all documents, or those that a choice by the question finds. Session.Documents
// lists them, and Passage.Document refers to them. Save writes a small file that refers to them,
// which Load takes. options may be nil.
// ErrUnsupported (the model or the strategy cannot), ErrBadArgument (no path; a file with a
// question), and the errors of Load.
func (m *Model) Compose(ctx context.Context, paths []string, options *ComposeOptions) (
	s *Session, err error) {
	defer raise(&err)
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.leave()
	return m.compose(ctx, nil, paths, options)
}

// Compose makes a session over documents of the library: those named, in this order, or without
// names all of this model, by name. Then documents that cannot be used are left out, and the log
// has the reason. Documents that come or go later do not change the session. options may be nil.
// ErrNotFound (no document of this model, or of a name), and the errors of Model.Compose.
func (l *Library) Compose(ctx context.Context, model *Model, names []string,
	options *ComposeOptions) (s *Session, err error) {
	defer raise(&err)
	if model == nil {
		return nil, failure(ErrBadArgument, "the model is nil")
	}
	if err := l.enter(); err != nil {
		return nil, err
	}
	defer l.leave()
	if err := model.enter(); err != nil {
		return nil, err
	}
	defer model.leave()
	s, err = model.compose(ctx, l, names, options)
	if s != nil {
		s.inherit(&l.handle)
	}
	return s, err
}

// compose makes a session over documents of a library, or files where it is nil.
func (m *Model) compose(ctx context.Context, l *Library, names []string,
	options *ComposeOptions) (*Session, error) {
	if options == nil {
		options = &ComposeOptions{}
	}
	var a arguments
	defer a.free()
	list, count := a.array("the documents", names)
	most := a.u32("MaxDocuments", options.MaxDocuments)
	var library *C.kv_library
	if l != nil {
		library = l.ptr
	}
	return m.makeSession(ctx, options.Session, nil, &a,
		func(s *Session, o *C.kv_session_options, c *call) C.kv_status {
			return C.kvasir_go_compose(library, m.ptr, list, C.size_t(count), most, o,
				c.control(0), &s.ptr, &c.e)
		})
}

// Documents lists the documents of Compose, in its order; none of other sessions.
// ErrBusy.
func (s *Session) Documents() (documents []ComposedDocument, err error) {
	err = s.do(func(e *C.kv_error) C.kv_status {
		for {
			raw, status := s.document(len(documents), e)
			if status == C.KV_NOT_FOUND || status == C.KV_BAD_STATE {
				return C.KV_OK
			}
			if status != C.KV_OK {
				return status
			}
			documents = append(documents, ComposedDocument{
				Path:      C.GoString(raw.path),
				Tokens:    int(raw.tokens),
				Candidate: raw.flags&C.KV_DOCUMENT_CANDIDATE != 0,
				Attended:  raw.flags&C.KV_DOCUMENT_ATTENDED != 0,
				Score:     float64(raw.score),
			})
		}
	})
	return documents, err
}

func (s *Session) document(index int, e *C.kv_error) (*C.kv_session_document, C.kv_status) {
	raw := sized[C.kv_session_document]()
	return raw, C.kv_session_get_document(s.ptr, C.uint32_t(index), raw, e)
}

// DocumentTokens returns the token ids of a document of Compose; passages refer to them.
// ErrNotFound, ErrBadState (not of Compose), ErrBusy.
func (s *Session) DocumentTokens(index int) (tokens []int32, err error) {
	if index < 0 {
		return nil, failure(ErrBadArgument, "the index is negative")
	}
	err = s.do(func(e *C.kv_error) C.kv_status {
		var status C.kv_status
		tokens, status = s.documentTokens(index, e)
		return status
	})
	return tokens, err
}

func (s *Session) documentTokens(index int, e *C.kv_error) ([]int32, C.kv_status) {
	return all(4096, func(to *int32, capacity C.size_t, count *C.size_t) C.kv_status {
		return C.kv_session_document_tokens(s.ptr, C.uint32_t(index), (*C.int32_t)(to), capacity,
			count, e)
	})
}

// SetDocuments replaces the documents of a session of Compose. Questions and answers stay. The
// limit of LimitDocuments ends. After a failure the session has the old documents.
// ErrBadState (not over several documents), ErrModelMismatch (other instructions or another chat
// format), and the errors of Compose.
func (s *Session) SetDocuments(ctx context.Context, paths []string) error {
	var a arguments
	defer a.free()
	list, count := a.array("the documents", paths)
	if a.err != nil {
		return a.err
	}
	return s.long(ctx, nil, func(c *call) C.kv_status {
		return C.kvasir_go_set_documents(s.ptr, list, C.size_t(count), c.control(0), &c.e)
	})
}

// LimitDocuments limits later answers to these of Documents, in ascending order; none: all are
// candidates.
// ErrBadState (not of Compose), ErrBadArgument, ErrBusy.
func (s *Session) LimitDocuments(indexes []int) error {
	var a arguments
	limits := make([]C.uint32_t, 0, len(indexes))
	for _, index := range indexes {
		limits = append(limits, a.u32("the index", index))
	}
	if a.err != nil {
		return a.err
	}
	return s.do(func(e *C.kv_error) C.kv_status {
		first := (*C.uint32_t)(unsafe.SliceData(limits))
		return C.kv_session_limit_documents(s.ptr, first, C.size_t(len(limits)), e)
	})
}
