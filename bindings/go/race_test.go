//go:build race

package kvasir_test

const raceDetector = true
