package nsqtest

import "sync"

// logSink hands the lines of a server's log to the test for as long as the server runs. A testing.T panics when it is
// told something after its test, and nsqd has goroutines that outlive its exit for a moment.
type logSink struct {
	mu   sync.Mutex // held while logf runs, so that close can promise silence
	logf func(format string, args ...any)
}

func newLogSink(logf func(format string, args ...any)) *logSink {
	return &logSink{logf: logf}
}

// Output is the interface that nsqd and nsqlookupd log to. The depth is of no use here.
func (s *logSink) Output(_ int, line string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.logf != nil {
		s.logf("%s", line)
	}
	return nil
}

func (s *logSink) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.logf = nil
}
