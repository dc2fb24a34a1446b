package e2e

import (
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

func startNSQDs(t *testing.T, n int, opts nsqtest.NSQDOptions) (nodes []node, addrs []string) {
	t.Helper()
	for range n {
		d := nsqtest.StartNSQD(t, opts)
		nodes = append(nodes, d)
		addrs = append(addrs, d.TCPAddr())
	}
	return nodes, addrs
}

// awaitShares waits until nsqds know of these shares, in any order.
func awaitShares(t *testing.T, nodes []node, want ...int64) {
	t.Helper()
	eventually(t, "the RDY that nsqd knows of is the share of each", func() bool {
		got := rdysOf(nodes)
		slices.Sort(got)
		return slices.Equal(want, got)
	})
}

func TestMaxInFlightIsSharedOut(t *testing.T) {
	t.Parallel()
	nodes, addrs := startNSQDs(t, 3, nsqtest.NSQDOptions{})
	c := startConsumer(t, newConfig(10), newLedger(t).handler(nil), addrs...)
	awaitShares(t, nodes, 3, 3, 4)
	c.ChangeMaxInFlight(31)
	awaitShares(t, nodes, 10, 10, 11)
	c.ChangeMaxInFlight(0)
	awaitShares(t, nodes, 0, 0, 0)
	c.ChangeMaxInFlight(3)
	awaitShares(t, nodes, 1, 1, 1)
	c.ChangeMaxInFlight(9)
	require.NoError(t, c.DisconnectFromNSQD(addrs[1]))
	awaitShares(t, []node{nodes[0], nodes[2]}, 4, 5)
	require.NoError(t, c.ConnectToNSQD(addrs[1]))
	awaitShares(t, nodes, 3, 3, 3)
}

func TestMaxRDYCountOfAnNSQD(t *testing.T) {
	t.Parallel()
	small := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{MaxRDYCount: 5})
	large := nsqtest.StartNSQD(t)
	c := startConsumer(t, newConfig(20), newLedger(t).handler(nil), small.TCPAddr())
	awaitShares(t, []node{small}, 5)
	require.NoError(t, c.ConnectToNSQD(large.TCPAddr()))
	awaitShares(t, []node{small, large}, 5, 15)
	require.EqualValues(t, 5, rdyOf(small))
	c.ChangeMaxInFlight(6000)
	eventually(t, "both have the most they take", func() bool { return rdyOf(small) == 5 && rdyOf(large) == 2500 })
	require.Equal(t, 2, c.Stats().Connections, "RDY over the limit would have cost the connection")
}

func TestMaxInFlightIsNeverExceeded(t *testing.T) {
	t.Parallel()
	const maxInFlight = 7
	nodes, addrs := startNSQDs(t, 3, nsqtest.NSQDOptions{})
	l := newLedger(t)
	var running, most atomic.Int64
	cfg := newConfig(maxInFlight)
	c, err := nsq.NewConsumer(topic, channel, cfg)
	require.NoError(t, err)
	c.SetLogger(nil, nsq.LogLevelError)
	t.Cleanup(func() { stop(t, c) })
	c.AddConcurrentHandlers(l.handler(func(*nsq.Message, int) error {
		defer running.Add(-1)
		for n := running.Add(1); ; {
			m := most.Load()
			if n <= m || most.CompareAndSwap(m, n) {
				break
			}
		}
		<-time.After(time.Millisecond)
		return nil
	}), 4*maxInFlight)
	require.NoError(t, c.ConnectToNSQDs(addrs))
	// While RDY moves, what nsqd has sent under the old one can come on top.
	awaitShares(t, nodes, 2, 2, 3)
	for _, n := range nodes {
		l.publish(n, 300)
	}
	l.awaitAll()
	awaitDrained(t, nodes...)
	require.LessOrEqual(t, most.Load(), int64(maxInFlight))
	require.Greater(t, most.Load(), int64(3), "the budget is used")
}

func TestMoreNSQDsThanMaxInFlight(t *testing.T) {
	t.Parallel()
	nodes, addrs := startNSQDs(t, 3, nsqtest.NSQDOptions{})
	l := newLedger(t)
	cfg := newConfig(1)
	cfg.RDYTurnIdle = 20 * time.Millisecond
	cfg.RDYTurnBusy = 100 * time.Millisecond
	startConsumer(t, cfg, l.handler(nil), addrs...)
	for range 3 {
		for _, n := range nodes {
			l.publish(n, 20)
		}
		within(t, time.Second+slack, "each had its turn", func() bool { return len(l.missing()) == 0 })
	}
	l.awaitAll()
	awaitDrained(t, nodes...)
}

func TestPauseByMaxInFlight(t *testing.T) {
	t.Parallel()
	nodes, addrs := startNSQDs(t, 2, nsqtest.NSQDOptions{})
	l := newLedger(t)
	c := startConsumer(t, newConfig(10), l.handler(nil), addrs...)
	stopStream := l.stream(2*time.Millisecond, nodes...)
	l.awaitMore(100)
	c.ChangeMaxInFlight(0)
	eventually(t, "nsqds have been told, and have their answers", func() bool {
		for _, n := range nodes {
			s := channelStats(t, n)
			if len(s.Clients) != 1 || s.Clients[0].RDY != 0 || s.InFlight > 0 {
				return false
			}
		}
		return true
	})
	stopStream()
	done := l.done()
	// A joining nsqd does not end the pause.
	late := nsqtest.StartNSQD(t)
	l.publish(late, 10)
	require.NoError(t, c.ConnectToNSQD(late.TCPAddr()))
	nodes = append(nodes, late)
	for _, n := range nodes {
		l.publish(n, 50)
		s := channelStats(t, n)
		require.Zero(t, s.Clients[0].RDY)
		require.Zero(t, s.InFlight)
	}
	require.Equal(t, done, l.done())
	c.ChangeMaxInFlight(10)
	l.awaitAll()
	awaitDrained(t, nodes...)
}

func TestPauseOnTheSideOfNSQD(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	l := newLedger(t)
	c := startConsumer(t, newConfig(10), l.handler(nil), n.TCPAddr())
	l.publish(n, 100)
	l.awaitAll()
	require.NoError(t, n.PauseChannel(topic, channel))
	l.publish(n, 20)
	eventually(t, "the messages wait", func() bool { return channelStats(t, n).Depth == 20 })
	require.Equal(t, 100, l.done())
	require.EqualValues(t, 10, client(t, n).RDY)
	require.NoError(t, n.UnpauseChannel(topic, channel))
	l.awaitAll()
	awaitDrained(t, n)
	require.Equal(t, 1, c.Stats().Connections)
}

func TestBackoffAndRecovery(t *testing.T) {
	t.Parallel()
	const maxInFlight = 12
	nodes, addrs := startNSQDs(t, 3, nsqtest.NSQDOptions{})
	l := newLedger(t)
	var failing atomic.Bool
	var failed atomic.Int64
	cfg := newConfig(maxInFlight)
	cfg.BackoffMultiplier = 50 * time.Millisecond
	cfg.MaxBackoffDuration = 200 * time.Millisecond // two levels: 100ms and 200ms
	c := startConsumer(t, cfg, l.handler(func(*nsq.Message, int) error {
		if failing.Load() {
			failed.Add(1)
			return errors.New("down")
		}
		return nil
	}), addrs...)
	for _, n := range nodes {
		l.publish(n, 50)
	}
	l.awaitAll()
	awaitShares(t, nodes, 4, 4, 4)

	failing.Store(true)
	start := time.Now()
	for _, n := range nodes {
		l.publish(n, 50)
	}
	eventually(t, "the top of backoff", func() bool { return c.Status().BackoffLevel == 2 })
	awaitShares(t, nodes, 0, 0, 0)
	// Each probe is one message on one nsqd.
	eventually(t, "several probes have failed", func() bool {
		var offered int64
		for _, n := range nodes {
			s := channelStats(t, n)
			require.Len(t, s.Clients, 1)
			offered += max(s.Clients[0].RDY, s.Clients[0].InFlight)
		}
		// A probe may be over at one nsqd and begin at another while we ask.
		require.LessOrEqual(t, offered, int64(2))
		return failed.Load() >= maxInFlight+6
	})
	// The first ones failed together, then came one each 100ms, and then one each 200ms; a few more if answers took long.
	require.Greater(t, time.Since(start), 4*200*time.Millisecond, "backoff slows the failures down")

	failing.Store(false)
	l.awaitAll()
	awaitShares(t, nodes, 4, 4, 4)
	require.Zero(t, c.Status().BackoffLevel)
	awaitDrained(t, nodes...)
}

func TestBackoffOff(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	l := newLedger(t)
	var failures atomic.Int64
	startConsumer(t, newConfig(10), l.handler(func(*nsq.Message, int) error {
		if failures.Add(1) <= 200 {
			return errors.New("down")
		}
		return nil
	}), n.TCPAddr())
	l.publish(n, 50)
	eventually(t, "all is handled, at full RDY at all times", func() bool {
		require.EqualValues(t, 10, client(t, n).RDY)
		return len(l.missing()) == 0
	})
}

func TestStatisticsAgreeWithNSQD(t *testing.T) {
	t.Parallel()
	nodes, addrs := startNSQDs(t, 3, nsqtest.NSQDOptions{})
	l := newLedger(t)
	c := startConsumer(t, newConfig(9), l.handler(func(m *nsq.Message, number int) error {
		if number%7 == 0 && m.Attempts < 3 {
			return errors.New("not yet")
		}
		return nil
	}), addrs...)
	for _, n := range nodes {
		l.publish(n, 100)
	}
	l.awaitAll()
	awaitDrained(t, nodes...)
	var received, finished, requeued uint64
	for _, n := range nodes {
		s := client(t, n)
		received += s.MessageCount
		finished += s.FinishCount
		requeued += s.RequeueCount

		row := nsqdStatus(c, n.TCPAddr())
		require.Equal(t, s.MessageCount, row.MessagesReceived)
		require.Equal(t, s.FinishCount, row.MessagesFinished)
		require.Equal(t, s.RequeueCount, row.MessagesRequeued)
		require.Equal(t, s.RDY, row.RDY)
	}
	require.Equal(t, nsq.ConsumerStats{
		MessagesReceived: received,
		MessagesFinished: finished,
		MessagesRequeued: requeued,
		Connections:      3,
	}, *c.Stats())
	require.EqualValues(t, 300, finished)
	require.EqualValues(t, 2*43, requeued)
}
