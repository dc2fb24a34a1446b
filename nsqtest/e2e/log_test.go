package e2e

import (
	"strings"
	"sync"
	"testing"

	"github.com/rdyloop/nsq"
)

// keptLog keeps what a consumer logs at Info and above, and passes it on to the test's log.
type keptLog struct {
	testLog

	mu    sync.Mutex // guards lines
	lines []string
}

// keepLog has a consumer of newConsumer log to where its lines can be counted.
func keepLog(t *testing.T, c *nsq.Consumer) *keptLog {
	l := &keptLog{testLog: testLog{t: t}}
	c.SetLogger(l, nsq.LogLevelInfo)
	t.Cleanup(l.testLog.close)
	return l
}

func (l *keptLog) Output(depth int, line string) error {
	l.mu.Lock()
	l.lines = append(l.lines, line)
	l.mu.Unlock()
	return l.testLog.Output(depth, line)
}

// count is how many lines of a level, or with this in them, there are.
func (l *keptLog) count(text string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}
