package e2e

import (
	"context"
	"errors"
	"maps"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/rdyloop/nsq/nsqtest/internal/left"
	"github.com/stretchr/testify/require"
)

// TestStopOnABusyTopic stops consumers with messages in flight while more are being published, fifty times, in all layer stacks in turn.
// When StopChan closes, nsqd has every message back or finished: nothing is in flight, and nothing was lost or counted twice.
func TestStopOnABusyTopic(t *testing.T) {
	t.Parallel()
	const rounds, few, many = 50, 40, 1000
	certs := nsqtest.TempCertificates(t)
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{Certificates: certs})
	require.NoError(t, n.CreateChannel(topic, channel))
	l := newLedger(t)
	l.publish(n, 2*many)
	names := slices.Sorted(maps.Keys(stacks))
	var finished, requeued uint64
	for round := range rounds {
		// With many, nsqd is in the middle of sending when CLS comes; with few, it waits for answers.
		cfg := newConfig([]int{few, many}[round%2])
		cfg.DefaultRequeueDelay = time.Minute
		stacks[names[round%len(names)]].configure(cfg, certs)
		begun := make(chan struct{})
		begin := sync.OnceFunc(func() { close(begun) })
		c := startConsumer(t, cfg, l.handler(func(m *nsq.Message, number int) error {
			defer begin()
			switch {
			case number%50 == 0:
				return errors.New("in a minute")
			case number%3 == 0:
				<-time.After(time.Duration(number%5) * time.Millisecond)
			}
			return nil
		}), n.TCPAddr())
		stopStream := l.stream(time.Millisecond, n)
		l.publish(n, 2*few)
		receive(t, "a message is handled", begun)

		c.Stop()
		receiveClosed(t, c.StopChan)
		s := channelStats(t, n)
		require.Zero(t, s.InFlight, "in flight at nsqd in round %d", round)
		require.Empty(t, s.Clients, "connections at nsqd in round %d", round)

		stopStream()
		stats := c.Stats()
		require.Equal(t, stats.MessagesReceived, stats.MessagesFinished+stats.MessagesRequeued, "each delivery was answered")
		finished += stats.MessagesFinished
		requeued += stats.MessagesRequeued
		published := l.published()
		eventually(t, "nsqd has, or the consumer has finished, what was published", func() bool {
			topicStats, err := n.TopicStats(topic)
			require.NoError(t, err)
			s := topicStats.Channels[0]
			return uint64(topicStats.Depth+s.Depth)+uint64(s.Deferred+s.InFlight)+finished == published
		})
		require.Equal(t, uint64(l.done()), finished)
	}
	s := channelStats(t, n)
	require.Equal(t, requeued, s.RequeueCount, "nsqd has read every REQ")
	require.Zero(t, s.TimeoutCount)
	require.Greater(t, requeued, uint64(rounds), "there were messages to give back")

	// The last consumer handles what they have left, but for those that come back in a minute.
	startConsumer(t, newConfig(many), l.handler(nil), n.TCPAddr())
	eventually(t, "what was given back is handled", func() bool {
		s := channelStats(t, n)
		return s.Depth == 0 && s.InFlight == 0
	})
	require.Len(t, l.missing(), channelStats(t, n).Deferred)
	l.checkAgain()
}

// published is how many messages nsqd has confirmed.
func (l *ledger) published() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return uint64(len(l.accepted))
}

func receiveClosed(t *testing.T, ch <-chan int) {
	t.Helper()
	select {
	case _, open := <-ch:
		require.False(t, open, "nothing is ever sent on it")
	case <-time.After(patience):
		require.FailNow(t, "the consumer does not stop")
	}
}

// TestNextConsumerTakesOver: what one has not handled when it stops, the next one gets at once, not after a timeout.
func TestNextConsumerTakesOver(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	l := newLedger(t)
	l.publish(n, 2000)
	slow := l.handler(func(*nsq.Message, int) error {
		<-time.After(time.Millisecond)
		return nil
	})
	for range 5 {
		c := startConsumer(t, newConfig(50), slow, n.TCPAddr())
		l.awaitMore(20)
		stop(t, c)
	}
	require.NotEmpty(t, l.missing())
	startConsumer(t, newConfig(50), l.handler(nil), n.TCPAddr())
	within(t, 5*time.Second, "all is handled", func() bool { return len(l.missing()) == 0 })
	l.awaitAll()
}

func TestStopWhenIdleIsQuick(t *testing.T) {
	t.Parallel()
	nodes, addrs := startNSQDs(t, 3, nsqtest.NSQDOptions{})
	lookupd := nsqtest.StartNSQLookupd(t)
	l := newLedger(t)
	best := time.Hour
	for range 5 {
		cfg := newConfig(50)
		cfg.LookupdPollInterval = time.Minute
		c := startConsumer(t, cfg, l.handler(nil), addrs...)
		require.NoError(t, c.ConnectToNSQLookupd(lookupd.HTTPAddr()))
		l.publish(nodes[0], 10)
		l.awaitAll()
		awaitDrained(t, nodes[0])
		start := time.Now()
		stop(t, c)
		best = min(best, time.Since(start)) // the machine is busy with other tests
	}
	require.Less(t, best, 100*time.Millisecond)
}

// TestStopWithAStuckHandler gives up by the deadline: the message comes again after its timeout.
func TestStopWithAStuckHandler(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{MsgTimeout: 2 * time.Second})
	l := newLedger(t)
	const messages = 10
	l.publish(n, messages)
	stuck, release := make(chan struct{}, messages), make(chan struct{})
	var broken atomic.Bool
	h := l.handler(func(*nsq.Message, int) error {
		if broken.Load() {
			stuck <- struct{}{}
			<-release
		}
		return nil
	})
	broken.Store(true)
	c, err := nsq.NewConsumer(topic, channel, newConfig(messages))
	require.NoError(t, err)
	c.SetLogger(nil, nsq.LogLevelError)
	c.AddHandler(h)
	require.NoError(t, c.ConnectToNSQD(n.TCPAddr()))
	receive(t, "a handler is stuck", stuck)
	eventually(t, "the others wait behind it", func() bool { return client(t, n).InFlight == messages })

	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	start := time.Now()
	var left *nsq.ShutdownError
	require.ErrorAs(t, c.Shutdown(ctx), &left)
	require.Less(t, time.Since(start), 200*time.Millisecond+slack)
	require.Equal(t, 1, left.HandlersRunning)
	require.Equal(t, 1, left.Unanswered)
	require.ErrorIs(t, left, context.DeadlineExceeded)
	receiveClosed(t, c.StopChan)
	s := channelStats(t, n)
	require.EqualValues(t, messages-1, s.RequeueCount, "what no handler had was given back before")

	broken.Store(false)
	close(release)
	l.fault(n.TCPAddr(), 1) // the stuck one is finished here, and nsqd never hears of it
	startConsumer(t, newConfig(messages), l.handler(nil), n.TCPAddr())
	l.awaitAll()
	awaitDrained(t, n)
	require.EqualValues(t, 1, channelStats(t, n).TimeoutCount)
}

// TestNothingIsLeftAfterStopChan is not parallel: it counts goroutines and file descriptors of the whole process. The servers are
// processes, so that what is counted is the consumer's alone.
func TestNothingIsLeftAfterStopChan(t *testing.T) {
	certs := nsqtest.TempCertificates(t)
	lookupd := nsqtest.StartNSQLookupd(t)
	var nodes []node
	for range 2 {
		n := nsqtest.StartNSQDProcess(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{lookupd.TCPAddr()}, Certificates: certs})
		require.NoError(t, n.CreateChannel(topic, channel))
		nodes = append(nodes, n)
	}
	awaitListed(t, lookupd, 2)
	require.Empty(t, left.Goroutines(patience), "of tests before this one")
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the collector would close what was forgotten
	before := openFiles(t)

	l := newLedger(t)
	for name, s := range stacks {
		cfg := newConfig(20)
		s.configure(cfg, certs)
		cfg.DialTimeout = 200 * time.Millisecond
		c := newConsumer(t, cfg, l.handler(nil))
		require.NoError(t, c.ConnectToNSQLookupds([]string{lookupd.HTTPAddr(), "127.0.0.1:1"}))
		require.Error(t, c.ConnectToNSQD("127.0.0.1:1"))
		require.Error(t, c.ConnectToNSQD(lookupd.HTTPAddr()))
		for _, n := range nodes {
			l.publish(n, 100)
		}
		l.awaitMore(50)
		c.Stop()
		receiveClosed(t, c.StopChan)
		// The goroutine that closed it may need a moment to return.
		require.Empty(t, left.Goroutines(200*time.Millisecond), name)
		if before >= 0 {
			// nsqlookupd is inside this process, and closes its ends when it sees that ours are closed.
			within(t, slack, "all file descriptors are closed: "+name, func() bool { return openFiles(t) <= before })
		}
	}
}

// openFiles is how many file descriptors are open, -1 if the system doesn't tell.
func openFiles(t *testing.T) int {
	t.Helper()
	n, err := left.OpenFiles()
	require.NoError(t, err)
	return n
}
