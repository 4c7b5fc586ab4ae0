package kvasir_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The program of the README, in a module made as the README says, answers from a text and a cache.
func TestTheReadmeIsTrue(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	check(t, err)
	here, err := filepath.Abs(".")
	check(t, err)
	folder := t.TempDir()
	block := func(language string) string {
		found := regexp.MustCompile("(?s)```" + language + "\n(.*?)```").FindSubmatch(readme)
		expect(t, found != nil, "the README has no %s", language)
		return string(found[1])
	}
	run := func(name string, arguments ...string) string {
		t.Helper()
		command := exec.Command(name, arguments...)
		command.Dir = folder
		out, err := command.CombinedOutput()
		expect(t, err == nil, "%s: %v\n%s", name, err, out)
		return string(out)
	}
	check(t, os.WriteFile(filepath.Join(folder, "main.go"), []byte(block("go")), 0o600))
	check(t, os.WriteFile(filepath.Join(folder, "book.txt"), []byte(document), 0o600))
	run("go", "mod", "init", "ask")
	run("sh", "-ec", strings.ReplaceAll(block("sh"), "PATH/bindings/go", "'"+here+"'"))
	run("go", "build", "-o", "ask", ".")
	model, err := filepath.Abs(modelPath)
	check(t, err)
	for range 2 {
		out := run("./ask", model, "book.txt", "book.kv", question)
		expect(t, strings.Contains(out, "4821907"), "%q", out)
		os.Remove(filepath.Join(folder, "book.txt")) // the cache is enough
	}
}
