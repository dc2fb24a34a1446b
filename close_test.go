package nsq

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Nothing is unanswered when Stop is called, but the connection was busy a moment ago, and nsqd is slow. What it has on the way
// is given back, and nsqd has read that when StopChan closes.
func TestStopBetweenTwoMessages(t *testing.T) {
	for name, test := range map[string]struct {
		slow       func(n *fakeNSQD) // before Stop
		stragglers func(t *testing.T, n *fakeNSQD)
	}{
		"that come long before CLOSE_WAIT": {
			slow: func(n *fakeNSQD) { n.at("CLS", fakeStep{delay: 300 * time.Millisecond}) },
			stragglers: func(t *testing.T, n *fakeNSQD) {
				time.Sleep(150 * time.Millisecond)
				n.publishN(5)
			},
		},
		"that come behind CLOSE_WAIT, and answers are read late": {
			slow: func(n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) {
					b.readDelay = 60 * time.Millisecond
					b.stragglers = 2
				})
			},
			stragglers: func(t *testing.T, n *fakeNSQD) { n.publishN(5) },
		},
		"of many, the last one long after CLOSE_WAIT": {
			slow: func(n *fakeNSQD) { n.at("CLS", fakeStep{delay: 10 * time.Millisecond}) },
			stragglers: func(t *testing.T, n *fakeNSQD) {
				n.publishN(15)
				time.Sleep(150 * time.Millisecond)
				require.Equal(t, 1, n.cluster.openConns(), "it is still listened to")
				n.conn().deliver(1)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				r := consumeFrom(t, n, 1, HandlerFunc(finishAll), func(cfg *Config) { cfg.MaxInFlight = 10 })
				n.publishN(10)
				synctest.Wait()
				require.Equal(t, 10, n.stats().Finished)
				require.Zero(t, n.stats().InFlight)
				test.slow(n)
				r.Stop()
				test.stragglers(t, n)
				<-r.StopChan
				stats := n.stats()
				require.Zero(t, stats.InFlight)
				require.Positive(t, stats.Requeued)
				require.Equal(t, stats.Published, stats.Finished+stats.Depth)
			})
		})
	}
}
