// Package left tells what a consumer that has stopped has left behind in this process.
package left

import (
	"os"
	"runtime"
	"strings"
	"time"
)

// Goroutines returns the stacks of the library's goroutines that don't end in time. It looks again and again, since nothing
// tells when a goroutine has ended.
func Goroutines(limit time.Duration) []string {
	for deadline := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		left := goroutines()
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
	}
}

// goroutines returns the stacks of goroutines that run code of package nsq or were started by it.
func goroutines() (stacks []string) {
	buf := make([]byte, 1<<20)
	n := runtime.Stack(buf, true)
	for n == len(buf) {
		buf = make([]byte, 2*len(buf))
		n = runtime.Stack(buf, true)
	}
	for stack := range strings.SplitSeq(string(buf[:n]), "\n\n") {
		if strings.Contains(stack, "github.com/rdyloop/nsq.") {
			stacks = append(stacks, stack)
		}
	}
	return stacks
}

// OpenFiles is how many file descriptors are open, -1 if the system doesn't tell.
func OpenFiles() (int, error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if os.IsNotExist(err) {
		return -1, nil
	}
	return len(entries), err
}
