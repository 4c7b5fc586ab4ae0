//go:build race || asan

package kvasir_test

const watched = true
