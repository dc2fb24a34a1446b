package nsq

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// newTestConsumer returns a silent consumer of topic "t" and channel "c" that dials the cluster's fakes. tune, if not
// nil, changes the config first.
func newTestConsumer(t *testing.T, cluster *fakeCluster, tune func(cfg *Config)) *Consumer {
	t.Helper()
	cfg := NewConfig()
	cfg.Dial = cluster.Dial
	if tune != nil {
		tune(cfg)
	}
	r, err := NewConsumer("t", "c", cfg)
	require.NoError(t, err)
	r.SetLogger(nil, LogLevelInfo)
	return r
}

// stopConsumer stops r and fails the test if that takes longer than limit.
func stopConsumer(t *testing.T, r *Consumer, limit time.Duration) {
	t.Helper()
	r.Stop()
	select {
	case <-r.StopChan:
	case <-time.After(limit):
		require.FailNow(t, "the consumer did not stop in time", "%s", limit)
	}
}

// fewer is n, or a quarter of it with the race detector, under which everything takes many times as long: what races
// does so in few rounds, and CI makes twenty runs of them.
func fewer(n int) int {
	if raceDetector {
		return n / 4
	}
	return n
}

// skipUnderRace is for long tests that can show no race: they run without the detector, once, not twenty times with it.
func skipUnderRace(t *testing.T, shows string) {
	if raceDetector {
		t.Skipf("shows %s, which takes long and has nothing to do with races: run it without -race", shows)
	}
}
