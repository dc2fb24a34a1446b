package e2e

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

// shortest is the shortest message timeout that nsqd takes from a client.
const shortest = time.Second

func TestMessageTimeout(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	deliveries := make(chan *nsq.Message, 8)
	release := make(chan struct{})
	cfg := newConfig(4)
	cfg.MsgTimeout = shortest
	c := startConsumer(t, cfg, nsq.HandlerFunc(func(m *nsq.Message) error {
		deliveries <- m
		if m.Attempts == 1 {
			<-release // far too long
		}
		return nil
	}), n.TCPAddr())

	require.NoError(t, n.Publish(topic, []byte("one")))
	first := receive(t, "the first delivery", deliveries)
	start := time.Now()
	second := receive(t, "the second delivery", deliveries)
	require.Greater(t, time.Since(start), shortest-100*time.Millisecond)
	require.Less(t, time.Since(start), shortest+slack)
	require.Equal(t, first.ID, second.ID)
	require.EqualValues(t, 2, second.Attempts)
	eventually(t, "the second one is finished", func() bool { return client(t, n).FinishCount == 1 })

	close(release)
	eventually(t, "the late answer is counted", func() bool { return c.Status().LateAnswers == 1 })
	require.NoError(t, n.Publish(topic, []byte("two")), "the connection has taken no harm")
	receive(t, "another message", deliveries)
	awaitDrained(t, n)
	s := channelStats(t, n)
	require.EqualValues(t, 1, s.TimeoutCount)
	require.EqualValues(t, 2, s.Clients[0].FinishCount)
	require.EqualValues(t, 1, c.Status().MessagesExpired)
	require.EqualValues(t, 2, c.Stats().MessagesFinished)
}

// TestMessagesThatWaitTooLong fill the queue behind one slow handler: those whose timeout has passed are not handled, since nsqd
// has them again.
func TestMessagesThatWaitTooLong(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	l := newLedger(t)
	const messages = 20
	l.publish(n, messages)
	slow := make(chan struct{}, 1)
	slow <- struct{}{}
	cfg := newConfig(messages)
	cfg.MsgTimeout = shortest
	c, err := nsq.NewConsumer(topic, channel, cfg)
	require.NoError(t, err)
	c.SetLogger(nil, nsq.LogLevelError)
	t.Cleanup(func() { stop(t, c) })
	c.AddHandler(l.handler(func(m *nsq.Message, _ int) error {
		select {
		case <-slow: // the first one alone
			keepTouching(m, 1500*time.Millisecond)
		default:
		}
		return nil
	}))
	require.NoError(t, c.ConnectToNSQD(n.TCPAddr()))
	l.awaitAll()
	awaitDrained(t, n)
	s := channelStats(t, n)
	require.EqualValues(t, messages-1, s.TimeoutCount)
	require.EqualValues(t, messages, s.Clients[0].FinishCount)
	require.EqualValues(t, messages-1, c.Status().MessagesExpired)
	require.Zero(t, c.Status().LateAnswers)
}

// keepTouching is a handler that takes so long and touches its message meanwhile.
func keepTouching(m *nsq.Message, work time.Duration) {
	done := time.NewTimer(work)
	defer done.Stop()
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			m.Touch()
		case <-done.C:
			return
		}
	}
}

func TestTouchExtendsTheTimeout(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	l := newLedger(t)
	l.publish(n, 5)
	cfg := newConfig(5)
	cfg.MsgTimeout = shortest
	c := startConsumer(t, cfg, l.handler(func(m *nsq.Message, _ int) error {
		keepTouching(m, 5*shortest/2)
		return nil
	}), n.TCPAddr())
	l.awaitAll()
	awaitDrained(t, n)
	require.Zero(t, channelStats(t, n).TimeoutCount)
	require.EqualValues(t, 5, client(t, n).FinishCount)
	require.Zero(t, c.Status().LateAnswers)
}

// TestTouchEndsAtTheMaximum: nsqd takes the message back max-msg-timeout after its delivery, however often it is touched.
func TestTouchEndsAtTheMaximum(t *testing.T) {
	t.Parallel()
	const most = 2 * time.Second
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{MsgTimeout: shortest, MaxMsgTimeout: most})
	deliveries := make(chan time.Time, 8)
	c := startConsumer(t, newConfig(2), nsq.HandlerFunc(func(m *nsq.Message) error {
		deliveries <- time.Now()
		if m.Attempts == 1 {
			keepTouching(m, most+shortest)
		}
		return nil
	}), n.TCPAddr())
	require.NoError(t, n.Publish(topic, []byte("one")))
	first := receive(t, "the first delivery", deliveries)
	second := receive(t, "the second delivery", deliveries)
	require.InDelta(t, most, second.Sub(first), float64(shortest/2))
	eventually(t, "both handlers are done", func() bool { return c.Status().Running == 0 })
	require.EqualValues(t, 1, client(t, n).FinishCount)
	require.True(t, connected(c, n.TCPAddr()), "a late TOUCH or FIN costs no connection")
	require.EqualValues(t, 1, channelStats(t, n).TimeoutCount)
}

func TestRequeueDelay(t *testing.T) {
	t.Parallel()
	const base = 150 * time.Millisecond
	tests := map[string]struct {
		fail func(m *nsq.Message) error
		gaps []time.Duration // before the second, third and fourth delivery
	}{
		"none": {
			func(m *nsq.Message) error { m.Requeue(0); return nil },
			[]time.Duration{0, 0, 0}},
		"as asked for": {
			func(m *nsq.Message) error { m.Requeue(2 * base); return nil },
			[]time.Duration{2 * base, 2 * base, 2 * base}},
		"without backoff": {
			func(m *nsq.Message) error { m.RequeueWithoutBackoff(base); return nil },
			[]time.Duration{base, base, base}},
		"by the attempts": {
			func(m *nsq.Message) error { m.Requeue(-1); return nil },
			[]time.Duration{base, 2 * base, 5 * base / 2}},
		"of an error": {
			func(*nsq.Message) error { return errors.New("no") },
			[]time.Duration{base, 2 * base, 5 * base / 2}},
		"of a panic": {
			func(*nsq.Message) error { panic("no") },
			[]time.Duration{base, 2 * base, 5 * base / 2}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := nsqtest.StartNSQD(t)
			deliveries := make(chan time.Time, 8)
			cfg := newConfig(1)
			cfg.DefaultRequeueDelay = base
			cfg.MaxRequeueDelay = 5 * base / 2
			startConsumer(t, cfg, nsq.HandlerFunc(func(m *nsq.Message) error {
				deliveries <- time.Now()
				if int(m.Attempts) <= len(test.gaps) {
					return test.fail(m)
				}
				return nil
			}), n.TCPAddr())
			require.NoError(t, n.Publish(topic, []byte("one")))
			last := receive(t, "the first delivery", deliveries)
			for i, gap := range test.gaps {
				at := receive(t, "another delivery", deliveries)
				require.GreaterOrEqual(t, at.Sub(last), gap, "before delivery %d", i+2)
				require.Less(t, at.Sub(last), gap+slack, "before delivery %d", i+2)
				last = at
			}
			awaitDrained(t, n)
			require.EqualValues(t, 3, client(t, n).RequeueCount)
			require.EqualValues(t, 1, client(t, n).FinishCount)
		})
	}
}

// TestRequeueBeyondTheMaximum: a delay that nsqd would not take is cut, and costs no connection.
func TestRequeueBeyondTheMaximum(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	l := newLedger(t)
	startConsumer(t, newConfig(3), l.handler(func(m *nsq.Message, number int) error {
		if number == 0 {
			m.RequeueWithoutBackoff(1000 * time.Hour)
		}
		return nil
	}), n.TCPAddr())
	l.publish(n, 3)
	eventually(t, "the message is deferred", func() bool {
		s := channelStats(t, n)
		return s.Deferred == 1 && s.InFlight == 0 && s.Depth == 0
	})
	require.EqualValues(t, 2, client(t, n).FinishCount)
}

// gaveUp is a handler that also hears of the messages that are given up.
type gaveUp struct {
	nsq.Handler
	attempts chan uint16
}

func (g gaveUp) LogFailedMessage(m *nsq.Message) { g.attempts <- m.Attempts }

func TestAttemptsLimit(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	var runs atomic.Int64
	h := gaveUp{attempts: make(chan uint16, 8)}
	h.Handler = nsq.HandlerFunc(func(*nsq.Message) error {
		runs.Add(1)
		return errors.New("never")
	})
	cfg := newConfig(1)
	cfg.MaxAttempts = 3
	c := startConsumer(t, cfg, h, n.TCPAddr())
	require.NoError(t, n.Publish(topic, []byte("one")))
	require.EqualValues(t, 4, receive(t, "the message is given up", h.attempts))
	awaitDrained(t, n)
	require.EqualValues(t, 3, runs.Load())
	require.EqualValues(t, 1, client(t, n).FinishCount)
	require.EqualValues(t, 3, client(t, n).RequeueCount)
	require.EqualValues(t, 1, c.Status().MessagesGivenUp)
	require.Empty(t, h.attempts)
}

func TestNoAttemptsLimit(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	startConsumer(t, newConfig(1), nsq.HandlerFunc(func(m *nsq.Message) error {
		if m.Attempts < 50 {
			return errors.New("not yet")
		}
		return nil
	}), n.TCPAddr())
	require.NoError(t, n.Publish(topic, []byte("one")))
	eventually(t, "the fiftieth attempt", func() bool { return client(t, n).FinishCount == 1 })
	require.EqualValues(t, 49, client(t, n).RequeueCount)
}

func TestAnswersFromElsewhere(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	l := newLedger(t)
	held := make(chan *nsq.Message, 100)
	c := startConsumer(t, newConfig(100), l.handler(func(m *nsq.Message, _ int) error {
		m.DisableAutoResponse()
		held <- m
		return errors.New("has no effect")
	}), n.TCPAddr())
	l.publish(n, 100)
	for range 100 {
		m := receive(t, "a message", held)
		go func() {
			m.Finish()
			m.Requeue(0) // neither of the two
			m.Finish()
		}()
	}
	awaitDrained(t, n)
	require.EqualValues(t, 100, client(t, n).FinishCount)
	require.Zero(t, client(t, n).RequeueCount)
	require.EqualValues(t, 100, c.Stats().MessagesReceived)
}

func TestEphemeralChannel(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	l := newLedger(t)
	const ephemeral = "tail#ephemeral"
	c := newConsumerOf(t, ephemeral, newConfig(5), l.handler(nil))
	require.NoError(t, c.ConnectToNSQD(n.TCPAddr()))
	l.publish(n, 50)
	l.awaitAll()
	_, err := n.ChannelStats(topic, ephemeral)
	require.NoError(t, err)
	stop(t, c)
	eventually(t, "the channel has gone with its consumer", func() bool {
		_, err := n.ChannelStats(topic, ephemeral)
		return errors.Is(err, nsqtest.ErrNotFound)
	})
}

func TestSampling(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	l := newLedger(t)
	cfg := newConfig(100)
	cfg.SampleRate = 25
	startConsumer(t, cfg, l.handler(nil), n.TCPAddr())
	const messages = 2000
	l.publish(n, messages)
	awaitDrained(t, n)
	eventually(t, "what was sampled is handled", func() bool {
		return client(t, n).FinishCount == client(t, n).MessageCount
	})
	require.EqualValues(t, 25, client(t, n).SampleRate)
	require.InDelta(t, messages/4, l.done(), messages/10, "more than ten standard deviations")
}

func TestDeferredPublish(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	deliveries := make(chan time.Time, 1)
	startConsumer(t, newConfig(1), nsq.HandlerFunc(func(*nsq.Message) error {
		deliveries <- time.Now()
		return nil
	}), n.TCPAddr())
	start := time.Now()
	require.NoError(t, n.DeferredPublish(topic, 300*time.Millisecond, []byte("later")))
	require.GreaterOrEqual(t, receive(t, "the message", deliveries).Sub(start), 300*time.Millisecond)
}
