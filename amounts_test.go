package nsq

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// nsqd counts attempts in 16 bits, from 1, and goes on at 0 after 65535.
func TestAttemptsAtTheEndOfTheirRange(t *testing.T) {
	for name, test := range map[string]struct {
		limit, attempts uint16
		runs            int32
		wrapped         bool // is told
	}{
		"the highest limit, not reached":    {65535, 65534, 1, false},
		"the highest limit, reached":        {65535, 65535, 1, false},
		"the highest limit, passed":         {65535, 0, 1, true},
		"a lower limit, passed long ago":    {5, 65535, 0, false},
		"a lower limit, behind the wrap":    {5, 0, 1, true},
		"no limit, at the end of the range": {0, 65535, 1, false},
		"no limit, behind the wrap":         {0, 0, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				var log syncedLines
				h := &failingHandler{}
				r := consumeFrom(t, n, 1, h, func(cfg *Config) { cfg.MaxAttempts = test.limit })
				r.SetLogger(&log, LogLevelWarning)
				n.set(func(b *fakeBehaviour) { b.paused = true })
				n.conn().sendMessage("00000000000000aa", test.attempts, []byte("old"))
				synctest.Wait()
				require.Equal(t, test.runs, h.runs.Load())
				require.Len(t, h.failed, int(1-test.runs))
				require.Equal(t, test.wrapped, strings.Contains(log.text(), "msg 00000000000000aa has 0 attempts"))
			})
		})
	}
}
