package main

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLatency(t *testing.T) {
	for _, s := range latencySettings {
		for _, library := range []string{ours, goNSQ} {
			t.Run(s.name+", "+library, func(t *testing.T) {
				t.Parallel()
				l, rate, err := latencyOnce(t.Context(), s, library, 90)
				require.NoError(t, err)
				require.Positive(t, rate)
				require.Positive(t, l.P50)
				require.GreaterOrEqual(t, l.P90, l.P50)
				require.GreaterOrEqual(t, l.P99, l.P90)
				require.GreaterOrEqual(t, l.Max, l.P99)
			})
		}
	}
}

func latencyText(published time.Time) []byte {
	text := make([]byte, latencyBody)
	binary.BigEndian.PutUint64(text, uint64(published.UnixNano()))
	return text
}

func TestStopwatch(t *testing.T) {
	const warmUp, count = 10, 100
	w := newStopwatch(warmUp, count)
	for range warmUp { // slow, and not measured
		require.NoError(t, w.message(latencyText(time.Now().Add(-time.Hour))))
	}
	for i := range count {
		require.NoError(t, w.message(latencyText(time.Now().Add(-time.Duration(count-i)*time.Second))))
	}
	require.NoError(t, w.wait(t.Context()))
	l := w.latencies()
	const second, slack = 1e6, 0.5e6
	require.InDelta(t, 50*second, l.P50, slack)
	require.InDelta(t, 90*second, l.P90, slack)
	require.InDelta(t, 99*second, l.P99, slack)
	require.InDelta(t, 100*second, l.Max, slack)
}

func TestStopwatchNoticesWhatIsWrong(t *testing.T) {
	tests := map[string]func(*stopwatch) error{
		"a message too many":        func(w *stopwatch) error { return w.message(latencyText(time.Now())) },
		"a message of another body": func(w *stopwatch) error { return w.message([]byte("x")) },
	}
	for name, message := range tests {
		t.Run(name, func(t *testing.T) {
			w := newStopwatch(0, 1)
			require.NoError(t, w.message(latencyText(time.Now())))
			require.Error(t, message(w))
			require.Error(t, w.wait(t.Context()))
		})
	}
}

func TestNotAbove(t *testing.T) {
	tests := map[string]struct {
		mine, others sample
		want         bool
	}{
		"below":                             {sample{1, 2, 3}, sample{4, 5, 6}, true},
		"the same":                          {sample{1, 2, 3}, sample{1, 2, 3}, true},
		"above by less than go-nsq's noise": {sample{5.9, 5.9, 6}, sample{4, 5, 6}, true},
		"above by less than ours":           {sample{5, 5.9, 7}, sample{5, 5, 5}, true},
		"above by more than both":           {sample{5.5, 6.1, 7}, sample{4, 5, 6}, false},
		"above, without any noise":          {sample{5.1}, sample{5}, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, test.want, notAbove(test.mine, test.others))
		})
	}
}

func TestPrintLatency(t *testing.T) {
	slow, quick := &latencyRuns{}, &latencyRuns{}
	slow.add(latencies{P50: 200, P90: 300, P99: 400, Max: 500, CPU: unknown}, 5000)
	quick.add(latencies{P50: 100, P90: 200, P99: 300, Max: 400, CPU: 20}, 5000)
	for name, want := range map[string]int{"a target is met": 0, "a target is missed": 1} {
		t.Run(name, func(t *testing.T) {
			runs := map[string]*latencyRuns{ours: quick, goNSQ: slow}
			if want == 1 {
				runs = map[string]*latencyRuns{ours: slow, goNSQ: quick}
			}
			var out bytes.Buffer
			missed, err := printLatency(&out, latencySettings[:1], []map[string]*latencyRuns{runs})
			require.NoError(t, err)
			require.Equal(t, want, missed, out.String())
		})
	}
}
