package e2e

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/rdyloop/nsq/nsqtest/internal/left"
	"github.com/stretchr/testify/require"
)

// Each test has servers of its own, so one name of each kind will do.
const (
	topic   = "events"
	channel = "archive"
)

const (
	// patience is far longer than anything here takes: it ends a test that would hang.
	patience = 30 * time.Second

	// slack is what a bound in time is exceeded by on a machine that is busy with all the other tests.
	slack = 1500 * time.Millisecond

	// heartbeatInterval is the shortest one that nsqd accepts.
	heartbeatInterval = time.Second
)

// TestMain fails the run if anything of the library is left at its end: all tests stop their consumers.
func TestMain(m *testing.M) {
	code := m.Run()
	if stacks := left.Goroutines(patience); len(stacks) > 0 {
		fmt.Fprintf(os.Stderr, "FAIL: %d goroutines of the library are left:\n\n%s\n", len(stacks), strings.Join(stacks, "\n\n"))
		code = 1
	}
	os.Exit(code)
}

// eventually asks until the answer is yes.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			require.FailNow(t, "never came true: "+what)
		}
	}
}

// within is eventually for a condition that comes true by itself in that time.
func within(t *testing.T, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	start := time.Now()
	eventually(t, what, cond)
	require.LessOrEqual(t, time.Since(start), limit, what)
}

func receive[T any](t *testing.T, what string, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		require.FailNow(t, "never came: "+what)
		panic("not reached")
	}
}

// testLog writes a consumer's lines to the test's log, and stops when the test ends.
type testLog struct {
	mu sync.Mutex // guards t
	t  *testing.T
}

func (l *testLog) Output(_ int, line string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.t != nil {
		fmt.Fprintln(l.t.Output(), time.Now().Format("15:04:05.000"), line)
	}
	return nil
}

func (l *testLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.t = nil
}

// newConfig is the config of most tests: quick to find nsqds, to come back and to try again, with backoff off.
func newConfig(maxInFlight int) *nsq.Config {
	cfg := nsq.NewConfig()
	cfg.MaxInFlight = maxInFlight
	cfg.MaxAttempts = 0
	cfg.MaxBackoffDuration = 0
	cfg.DefaultRequeueDelay = 0
	cfg.OutputBufferTimeout = 25 * time.Millisecond
	cfg.ReconnectInterval = 20 * time.Millisecond
	cfg.MaxReconnectInterval = 200 * time.Millisecond
	cfg.LookupdPollInterval = 50 * time.Millisecond
	cfg.LookupdPollJitter = 0
	return cfg
}

// newConsumer makes a consumer that is stopped when the test ends. It has as many handlers as messages in flight, eight at most.
func newConsumer(t *testing.T, cfg *nsq.Config, h nsq.Handler) *nsq.Consumer {
	t.Helper()
	return newConsumerOf(t, channel, cfg, h)
}

func newConsumerOf(t *testing.T, channel string, cfg *nsq.Config, h nsq.Handler) *nsq.Consumer {
	t.Helper()
	c, err := nsq.NewConsumer(topic, channel, cfg)
	require.NoError(t, err)
	log := &testLog{t: t}
	c.SetLogger(log, nsq.LogLevelInfo)
	c.AddConcurrentHandlers(h, max(1, min(8, cfg.MaxInFlight)))
	t.Cleanup(func() {
		stop(t, c)
		log.close()
	})
	return c
}

// startConsumer connects to each of the addresses.
func startConsumer(t *testing.T, cfg *nsq.Config, h nsq.Handler, addrs ...string) *nsq.Consumer {
	t.Helper()
	c := newConsumer(t, cfg, h)
	require.NoError(t, c.ConnectToNSQDs(addrs))
	return c
}

// stop stops a consumer and waits for that.
func stop(t *testing.T, c *nsq.Consumer) {
	t.Helper()
	c.Stop()
	select {
	case <-c.StopChan:
	case <-time.After(patience):
		require.FailNow(t, "the consumer does not stop")
	}
}

// node is an nsqd of either kind.
type node interface {
	TCPAddr() string
	Publish(topic string, body []byte) error
	MultiPublish(topic string, bodies [][]byte) error
	CreateChannel(topic, channel string) error
	Stats() (nsqtest.Stats, error)
	TopicStats(topic string) (nsqtest.TopicStats, error)
	ChannelStats(topic, channel string) (nsqtest.ChannelStats, error)
}

func channelStats(t *testing.T, n node) nsqtest.ChannelStats {
	t.Helper()
	s, err := n.ChannelStats(topic, channel)
	require.NoError(t, err)
	return s
}

// client returns the one connection to the channel.
func client(t *testing.T, n node) nsqtest.ClientStats {
	t.Helper()
	s := channelStats(t, n)
	require.Len(t, s.Clients, 1)
	return s.Clients[0]
}

// rdyOf is the RDY that nsqd knows of, -1 if not one consumer is connected.
func rdyOf(n node) int64 {
	s, err := n.ChannelStats(topic, channel)
	if err != nil || len(s.Clients) != 1 {
		return -1
	}
	return s.Clients[0].RDY
}

func rdysOf(nodes []node) (rdys []int64) {
	for _, n := range nodes {
		rdys = append(rdys, rdyOf(n))
	}
	return rdys
}

// awaitDrained waits until nsqds have nothing left of the topic: waiting, deferred or in flight.
func awaitDrained(t *testing.T, nodes ...node) {
	t.Helper()
	for _, n := range nodes {
		eventually(t, "nsqd has no message left", func() bool {
			s, err := n.TopicStats(topic)
			if err != nil || s.Depth > 0 {
				return false
			}
			for _, c := range s.Channels {
				if c.Depth > 0 || c.InFlight > 0 || c.Deferred > 0 {
					return false
				}
			}
			return true
		})
	}
}

// nsqdStatus is what a consumer tells of one nsqd; the zero value if it doesn't know it.
func nsqdStatus(c *nsq.Consumer, addr string) nsq.NSQDStatus {
	for _, s := range c.Status().NSQDs {
		if s.Address == addr {
			return s
		}
	}
	return nsq.NSQDStatus{}
}

func connected(c *nsq.Consumer, addr string) bool {
	return nsqdStatus(c, addr).State == nsq.NodeConnected
}

func awaitConnected(t *testing.T, c *nsq.Consumer, addrs ...string) {
	t.Helper()
	for _, addr := range addrs {
		eventually(t, addr+" is connected", func() bool { return connected(c, addr) })
	}
}

// awaitPolls waits until every nsqlookupd has given n more good answers.
func awaitPolls(t *testing.T, c *nsq.Consumer, n int) {
	t.Helper()
	for range n {
		before := c.Status().NSQLookupds
		for i := range before {
			eventually(t, "another poll", func() bool {
				return c.Status().NSQLookupds[i].LastAnswer.After(before[i].LastAnswer)
			})
		}
	}
}
