package e2e

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

func needsFreeze(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("Windows can't freeze a process: nsqtest has no Freeze there")
	}
}

// TestShortFreeze is over before the silence is one heartbeat too long: the connection stays, and no message comes twice.
func TestShortFreeze(t *testing.T) {
	needsFreeze(t)
	t.Parallel()
	n := nsqtest.StartNSQDProcess(t)
	p := nsqtest.StartProxy(t, n.TCPAddr())
	l := newLedger(t)
	cfg := newConfig(20)
	cfg.HeartbeatInterval = 2 * heartbeatInterval // so a silence of 4s is too long
	c := startConsumer(t, cfg, l.handler(nil), p.Addr())
	lines := keepLog(t, c)
	stopStream := l.stream(2*time.Millisecond, n)
	for range 2 {
		l.awaitMore(200)
		require.NoError(t, n.Freeze())
		before := l.done()
		<-time.After(1200 * time.Millisecond)
		require.LessOrEqual(t, l.done(), before+2*cfg.MaxInFlight, "it was frozen")
		require.NoError(t, n.Thaw())
	}
	l.awaitMore(200)
	stopStream()
	l.awaitAll() // and the ledger knows no reason for a second time
	awaitDrained(t, n)
	require.EqualValues(t, 1, p.Accepted())
	require.Zero(t, channelStats(t, n).TimeoutCount)
	require.Zero(t, lines.count("ERR"))
	require.Zero(t, lines.count("WRN"))
}

// TestNSQDEndsInTheHandshake of a consumer that was connected before: frozen, the next try ends after read_timeout; killed, at
// once. Either way it is back soon after nsqd is.
func TestNSQDEndsInTheHandshake(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		end, back func(*nsqtest.NSQDProcess) error
		frozen    bool
	}{
		"frozen": {(*nsqtest.NSQDProcess).Freeze, (*nsqtest.NSQDProcess).Thaw, true},
		"killed": {(*nsqtest.NSQDProcess).Kill, (*nsqtest.NSQDProcess).Restart, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if test.frozen {
				needsFreeze(t)
			}
			t.Parallel()
			n := nsqtest.StartNSQDProcess(t, nsqtest.NSQDOptions{MsgTimeout: 2 * time.Second})
			p := nsqtest.StartProxy(t, n.TCPAddr())
			l := newLedger(t)
			cfg := newConfig(10)
			cfg.HeartbeatInterval, cfg.ReadTimeout = heartbeatInterval, heartbeatInterval
			c := startConsumer(t, cfg, l.handler(nil), p.Addr())
			lines := keepLog(t, c)
			stopping := startConsumer(t, cfg, l.handler(nil), p.Addr())
			l.publish(n, 20)
			l.awaitAll()
			awaitDrained(t, n)

			l.fault(p.Addr(), 2*(cfg.MaxInFlight+1))
			p.HoldAt(nsqtest.ToClient, "OK") // so that SUB is the step that nsqd's end finds it at
			before := p.Accepted()
			p.Cut()
			eventually(t, "the handshake has begun", func() bool { return p.Accepted() >= before+2 })
			if !test.frozen {
				eventually(t, "both wait for the answer to SUB", func() bool { return len(channelStats(t, n).Clients) == 2 })
			}
			require.NoError(t, test.end(n))
			require.NoError(t, p.Heal())
			before = p.Accepted()
			eventually(t, "the next tries", func() bool { return p.Accepted() >= before+2 })
			require.False(t, connected(c, p.Addr()))
			start := time.Now()
			stop(t, stopping)
			require.Less(t, time.Since(start), slack)

			require.NoError(t, test.back(n))
			limit := cfg.ReadTimeout + cfg.MaxReconnectInterval + slack
			within(t, limit, "it is connected again", func() bool { return connected(c, p.Addr()) })
			l.publish(n, 20)
			l.awaitAll()
			awaitDrained(t, n)
			require.Zero(t, lines.count("ERR"))
			require.LessOrEqual(t, lines.count("WRN"), 10)
		})
	}
}

// TestNSQDEndsDuringStop: the consumer stops in time, and what nsqd has not read of its answers comes again.
func TestNSQDEndsDuringStop(t *testing.T) {
	t.Parallel()
	opts := nsqtest.NSQDOptions{MsgTimeout: 2 * time.Second, MemQueueSize: -1, SyncEvery: 1} // keeps what it has when killed
	tests := map[string]struct {
		end, back func(*nsqtest.NSQDProcess) error
		deadline  time.Duration // of the caller; 0: none
		limit     time.Duration
		frozen    bool
	}{
		"frozen":                  {(*nsqtest.NSQDProcess).Freeze, (*nsqtest.NSQDProcess).Thaw, 0, stopLimit, true},
		"frozen, with a deadline": {(*nsqtest.NSQDProcess).Freeze, (*nsqtest.NSQDProcess).Thaw, 300 * time.Millisecond, 300 * time.Millisecond, true},
		"killed":                  {(*nsqtest.NSQDProcess).Kill, (*nsqtest.NSQDProcess).Restart, 0, 0, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if test.frozen {
				needsFreeze(t)
			}
			t.Parallel()
			const held = 5
			n := startOutageNSQD(t, opts)
			require.NoError(t, n.CreateChannel(topic, channel))
			l := newLedger(t)
			begun, answer := make(chan struct{}, 2*held), make(chan struct{})
			c := startConsumer(t, newConfig(held), l.handler(func(*nsq.Message, int) error {
				begun <- struct{}{}
				<-answer
				return nil
			}), n.TCPAddr())
			l.publish(n, held+10)
			for range held {
				receive(t, "a message", begun)
			}
			l.fault(n.TCPAddr(), held+1)
			require.NoError(t, test.end(n))
			start := time.Now()
			ctx := t.Context()
			if test.deadline > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, test.deadline)
				defer cancel()
			}
			result := make(chan error, 1)
			go func() { result <- c.Shutdown(ctx) }()
			time.AfterFunc(50*time.Millisecond, func() { close(answer) })
			require.NoError(t, receive(t, "the end", result), "all handlers were done, and what they answered is written")
			require.Less(t, time.Since(start), test.limit+slack)

			require.NoError(t, test.back(n))
			startConsumer(t, newConfig(held), l.handler(nil), n.TCPAddr())
			if test.frozen {
				l.awaitAll()
				awaitDrained(t, n)
				return
			}
			// NSQ's own loss: what was in flight, or in the hands of one of nsqd's goroutines. The handlers had the former.
			awaitDrained(t, n)
			require.LessOrEqual(t, len(l.missing()), 4)
			l.checkAgain()
		})
	}
}
