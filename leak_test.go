package nsq

import (
	"bytes"
	"runtime"
	"strings"
	"testing"
	"time"
)

// checkNoLeaks fails the test if goroutines started after this call are still there at its end. Call it first, so that
// it looks after all other clean-ups. It is for tests outside of synctest bubbles, which find leaks themselves, and not
// for parallel tests, whose goroutines can't be told apart.
func checkNoLeaks(t testing.TB) {
	t.Helper()
	before := goroutineStacks()
	t.Cleanup(func() {
		if leaked := waitForGoroutines(before, 2*time.Second); len(leaked) > 0 {
			t.Errorf("%d goroutines leaked:\n\n%s", len(leaked), strings.Join(leaked, "\n\n"))
		}
	})
}

// waitForGoroutines returns the stacks of goroutines that were not there before and do not end within patience:
// those that end now deserve a moment to do so.
func waitForGoroutines(before map[string]string, patience time.Duration) []string {
	for pause := time.Millisecond; ; pause *= 2 {
		var leaked []string
		for id, stack := range goroutineStacks() {
			if _, old := before[id]; !old {
				leaked = append(leaked, stack)
			}
		}
		if len(leaked) == 0 || pause > patience {
			return leaked
		}
		time.Sleep(pause)
	}
}

// goroutineStacks returns the stack of each goroutine but the caller's and those of the runtime and package testing, by the
// goroutine's number: numbers are never used again.
func goroutineStacks() map[string]string {
	buf := make([]byte, 64<<10)
	n := runtime.Stack(buf, true)
	for n == len(buf) {
		buf = make([]byte, 2*len(buf))
		n = runtime.Stack(buf, true)
	}
	found := make(map[string]string)
	for i, stack := range bytes.Split(buf[:n], []byte("\n\n")) {
		header, frames, _ := strings.Cut(strings.TrimSpace(string(stack)), "\n")
		if i == 0 || ofTestMachinery(frames) { // the first one is our own
			continue
		}
		id, _, _ := strings.Cut(strings.TrimPrefix(header, "goroutine "), " ")
		found[id] = header + "\n" + frames
	}
	return found
}

// ofTestMachinery tells by the frames of a goroutine whether it belongs to Go's own machinery.
func ofTestMachinery(frames string) bool {
	for _, of := range []string{
		"testing.(*T).Run(", "testing.(*T).Parallel(", "testing.(*M).startAlarm", "testing.runFuzz",
		"internal/synctest.", "os/signal.", "runtime.ensureSigM", "runtime/pprof.", "runtime.ReadTrace",
	} {
		if strings.Contains(frames, of) {
			return true
		}
	}
	return false
}
