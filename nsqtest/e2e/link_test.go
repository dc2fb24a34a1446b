package e2e

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

func TestLatency(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	p := nsqtest.StartProxy(t, n.TCPAddr())
	p.Latency(nsqtest.Both, 100*time.Millisecond)
	l := newLedger(t)
	l.publish(n, 1000)
	start := time.Now()
	startConsumer(t, newConfig(100), l.handler(nil), p.Addr())
	l.awaitAll()
	awaitDrained(t, n)
	// A few round trips for the handshake, and one for each hundred in flight. One for each message would be 200s.
	require.Less(t, time.Since(start), 15*200*time.Millisecond+2*slack)
	require.EqualValues(t, 1, p.Accepted())
	require.Zero(t, channelStats(t, n).TimeoutCount)
}

// TestSlowLink carries 5KB a second each way, in small pieces: what there is comes at that speed, over one connection.
func TestSlowLink(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	p := nsqtest.StartProxy(t, n.TCPAddr())
	p.Trickle(nsqtest.Both, 50, 10*time.Millisecond)
	l := newLedger(t)
	l.publish(n, 150)
	cfg := newConfig(20)
	cfg.HeartbeatInterval = heartbeatInterval
	startConsumer(t, cfg, l.handler(nil), p.Addr())
	start := time.Now()
	l.awaitAll()
	awaitDrained(t, n)
	// 42 bytes for a message in the one direction, and 21 for its FIN in the other.
	require.Less(t, time.Since(start), 3*150*42*time.Second/5000+slack)
	require.EqualValues(t, 1, p.Accepted(), "the connection was not lost")
	require.Zero(t, channelStats(t, n).TimeoutCount)
}

// TestBrokenLinks break all at once, in mid-stream. The consumer is back as soon as it can be.
func TestBrokenLinks(t *testing.T) {
	t.Parallel()
	const maxInFlight = 20
	tests := map[string]func(p *nsqtest.Proxy){
		"cut":                       func(p *nsqtest.Proxy) { p.Cut() },
		"reset":                     func(p *nsqtest.Proxy) { p.Reset() },
		"nsqd's side ends":          func(p *nsqtest.Proxy) { p.HalfClose(nsqtest.ToClient) },
		"the consumer's side ends":  func(p *nsqtest.Proxy) { p.HalfClose(nsqtest.ToServer) },
		"reset in a message":        func(p *nsqtest.Proxy) { p.CutAfter(nsqtest.ToClient, 50) },
		"reset in an answer":        func(p *nsqtest.Proxy) { p.CutAfter(nsqtest.ToServer, 10) },
		"refused for a few retries": func(p *nsqtest.Proxy) { refuseForAWhile(t, p) },
	}
	for name, breakIt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{MsgTimeout: 2 * time.Second})
			p := nsqtest.StartProxy(t, n.TCPAddr())
			l := newLedger(t)
			c := startConsumer(t, newConfig(maxInFlight), l.handler(nil), p.Addr())
			stopStream := l.stream(2*time.Millisecond, n)
			for i := range int64(3) {
				l.awaitMore(50)
				l.fault(p.Addr(), maxInFlight+1)
				breakIt(p)
				within(t, time.Second+slack, "it is connected again", func() bool {
					return p.Accepted() >= i+2 && connected(c, p.Addr())
				})
			}
			l.awaitMore(50)
			stopStream()
			l.awaitAll()
			awaitDrained(t, n)
			require.EqualValues(t, maxInFlight, rdyOf(n), "at full RDY again")
			require.EqualValues(t, 4, p.Accepted(), "one connection after the other")
		})
	}
}

func refuseForAWhile(t *testing.T, p *nsqtest.Proxy) {
	if err := p.Refuse(); err != nil {
		t.Error(err)
	}
	p.Cut()
	time.AfterFunc(300*time.Millisecond, func() {
		if err := p.Heal(); err != nil {
			t.Error(err)
		}
	})
}

// TestBlackHole: the link swallows everything, or all that nsqd sends, and neither side is told.
func TestBlackHole(t *testing.T) {
	t.Parallel()
	const maxInFlight = 20
	for name, dir := range map[string]nsqtest.Direction{"both ways": nsqtest.Both, "from nsqd": nsqtest.ToClient} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{MsgTimeout: 2 * time.Second})
			other := nsqtest.StartNSQD(t)
			p := nsqtest.StartProxy(t, n.TCPAddr())
			l := newLedger(t)
			cfg := newConfig(maxInFlight)
			cfg.HeartbeatInterval = heartbeatInterval
			cfg.ReadTimeout = 2 * heartbeatInterval
			c := startConsumer(t, cfg, l.handler(nil), p.Addr(), other.TCPAddr())
			stopStream := l.stream(2*time.Millisecond, n, other)
			l.awaitMore(100)
			l.fault(p.Addr(), maxInFlight+1)
			p.BlackHole(dir)
			within(t, 2*heartbeatInterval+slack, "the silence is noticed", func() bool { return !connected(c, p.Addr()) })
			require.ErrorIs(t, nsqdStatus(c, p.Addr()).LastError, nsq.ErrHeartbeatTimeout)
			eventually(t, "the other nsqd has the whole budget", func() bool { return rdyOf(other) == maxInFlight })
			l.awaitMore(100)

			p.Cut() // whatever is in the hole
			require.NoError(t, p.Heal())
			within(t, 2*heartbeatInterval+slack, "it is connected again", func() bool { return connected(c, p.Addr()) })
			stopStream()
			l.awaitAll()
			awaitDrained(t, n, other)
		})
	}
}

// TestSilenceToNSQD: only what the consumer sends is lost, so that nsqd ends the connection.
func TestSilenceToNSQD(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{MsgTimeout: 2 * time.Second})
	p := nsqtest.StartProxy(t, n.TCPAddr())
	l := newLedger(t)
	cfg := newConfig(5)
	cfg.HeartbeatInterval = heartbeatInterval
	cfg.ReadTimeout = 2 * heartbeatInterval
	startConsumer(t, cfg, l.handler(nil), p.Addr())
	l.publish(n, 10)
	l.awaitAll()
	l.fault(p.Addr(), 6)
	p.BlackHole(nsqtest.ToServer)
	l.publish(n, 50)
	eventually(t, "nsqd has closed the connection, and another try is under way", func() bool { return p.Accepted() == 2 })
	p.Cut()
	require.NoError(t, p.Heal())
	l.awaitAll()
	awaitDrained(t, n)
}

// TestNSQDStopsReading for 3s, and what the consumer sends fills all buffers. Its writer is stuck, and everything else goes on.
func TestNSQDStopsReading(t *testing.T) {
	t.Parallel()
	const maxInFlight, pause = 50, 3 * time.Second
	n := nsqtest.StartNSQD(t)
	other := nsqtest.StartNSQD(t)
	p := nsqtest.StartProxy(t, n.TCPAddr())
	l := newLedger(t)
	cfg := newConfig(maxInFlight)
	var dialer net.Dialer
	cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := dialer.DialContext(ctx, network, addr)
		if err == nil {
			err = nc.(*net.TCPConn).SetWriteBuffer(4 << 10)
		}
		return nc, err
	}
	held := make(chan *nsq.Message, 1000)
	c := startConsumer(t, cfg, l.handler(func(m *nsq.Message, _ int) error {
		if m.NSQDAddress == p.Addr() {
			m.DisableAutoResponse()
			held <- m
		}
		return nil
	}), p.Addr(), other.TCPAddr())
	eventually(t, "each has its share", func() bool { return rdyOf(n) == maxInFlight/2 && rdyOf(other) == maxInFlight/2 })
	l.publish(n, maxInFlight)
	var ms []*nsq.Message
	for range maxInFlight / 2 {
		ms = append(ms, receive(t, "a message", held))
	}

	p.Stall(nsqtest.ToServer)
	l.publish(other, 100)
	start := time.Now()
	for time.Since(start) < pause {
		for _, m := range ms {
			m.Touch() // 23 bytes, if the writer has taken the last one
		}
		<-time.After(time.Millisecond)
	}
	require.EqualValues(t, 125, l.done(), "other connections go on")
	require.NoError(t, p.Heal())
	for _, m := range ms {
		m.Finish()
	}
	for range maxInFlight / 2 {
		receive(t, "a message", held).Finish()
	}
	l.awaitAll()
	awaitDrained(t, n, other)
	require.EqualValues(t, 1, p.Accepted(), "the connection was not lost")
	require.Equal(t, 2, c.Stats().Connections)
	require.Zero(t, channelStats(t, n).TimeoutCount)
}

// TestConsumerStopsReading is what a slow network looks like: nsqd's messages back up, and come in the end.
func TestTheLinkPauses(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	p := nsqtest.StartProxy(t, n.TCPAddr())
	l := newLedger(t)
	startConsumer(t, newConfig(100), l.handler(nil), p.Addr())
	for range 20 {
		require.NoError(t, l.offer(n, [][]byte{randomBytes(50_000), randomBytes(1000)}))
	}
	p.Stall(nsqtest.Both)
	healed := time.AfterFunc(3*time.Second, func() {
		if err := p.Heal(); err != nil {
			t.Error(err)
		}
	})
	defer healed.Stop()
	for range 20 {
		require.NoError(t, l.offer(n, [][]byte{randomBytes(50_000), randomBytes(1000)}))
	}
	l.awaitAll()
	awaitDrained(t, n)
	require.EqualValues(t, 1, p.Accepted(), "the connection was not lost")
}
