package e2e

import (
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

// stopLimit is how long Stop waits for an nsqd that has something unanswered and does not react: 2s for CLOSE_WAIT, 1s for the end.
const stopLimit = 3 * time.Second

// badLink is something wrong with the link to an nsqd while its consumer stops.
type badLink struct {
	breakIt func(t *testing.T, p *nsqtest.Proxy)
	answers bool // what handlers answer still gets to nsqd, and what none has begun goes back, before StopChan closes
}

var badLinks = map[string]badLink{
	"latency":              {func(_ *testing.T, p *nsqtest.Proxy) { p.Latency(nsqtest.Both, 200*time.Millisecond) }, true},
	"trickle":              {func(_ *testing.T, p *nsqtest.Proxy) { p.Trickle(nsqtest.Both, 10, time.Millisecond) }, true},
	"CLS does not arrive":  {func(_ *testing.T, p *nsqtest.Proxy) { p.HoldAt(nsqtest.ToServer, "CLS") }, false},
	"CLS is not answered":  {func(_ *testing.T, p *nsqtest.Proxy) { p.HoldAt(nsqtest.ToClient, "CLOSE_WAIT") }, true},
	"black hole":           {func(_ *testing.T, p *nsqtest.Proxy) { p.BlackHole(nsqtest.Both) }, false},
	"black hole to nsqd":   {func(_ *testing.T, p *nsqtest.Proxy) { p.BlackHole(nsqtest.ToServer) }, false},
	"black hole from nsqd": {func(_ *testing.T, p *nsqtest.Proxy) { p.BlackHole(nsqtest.ToClient) }, true},
	"stalled":              {func(_ *testing.T, p *nsqtest.Proxy) { p.Stall(nsqtest.Both) }, false},
	"stalled to nsqd":      {func(_ *testing.T, p *nsqtest.Proxy) { p.Stall(nsqtest.ToServer) }, false},
	"stalled from nsqd":    {func(_ *testing.T, p *nsqtest.Proxy) { p.Stall(nsqtest.ToClient) }, true},
	"reset":                {func(_ *testing.T, p *nsqtest.Proxy) { p.Reset() }, false},
	"nsqd's side ends":     {func(_ *testing.T, p *nsqtest.Proxy) { p.HalfClose(nsqtest.ToClient) }, false},
	"gone, connecting": {func(_ *testing.T, p *nsqtest.Proxy) {
		p.Silent()
		p.Cut()
	}, false},
	"gone, refused": {func(t *testing.T, p *nsqtest.Proxy) {
		require.NoError(t, p.Refuse())
		p.Cut()
	}, false},
}

// TestStopOnABadLink stops in time whatever the link does, idle or with messages in the hands of handlers; what handlers answered gets to nsqd
// where it can, and what doesn't comes again.
func TestStopOnABadLink(t *testing.T) {
	t.Parallel()
	const held, more = 5, 20
	type stopCase struct {
		badLink
		name   string
		busy   bool
		nsqd   *nsqtest.NSQD
		proxy  *nsqtest.Proxy
		ledger *ledger
		c      *nsq.Consumer
		begun  chan struct{}
		answer chan struct{}
		took   chan time.Duration
	}
	var cases []*stopCase
	for name, link := range badLinks {
		for _, busy := range []bool{false, true} {
			s := &stopCase{badLink: link, name: name, busy: busy, ledger: newLedger(t), begun: make(chan struct{}, held+more), answer: make(chan struct{}), took: make(chan time.Duration, 1)}
			if busy {
				s.name += ", busy"
			}
			s.nsqd = nsqtest.StartNSQD(t, nsqtest.NSQDOptions{MsgTimeout: 5 * time.Second})
			s.proxy = nsqtest.StartProxy(t, s.nsqd.TCPAddr())
			cfg := newConfig(held)
			s.c = startConsumer(t, cfg, s.ledger.handler(func(*nsq.Message, int) error {
				if busy {
					s.begun <- struct{}{}
					<-s.answer
				}
				return nil
			}), s.proxy.Addr())
			cases = append(cases, s)
		}
	}
	for _, s := range cases { // all are there: the time of messages begins
		if s.busy {
			s.ledger.publish(s.nsqd, held+more)
		}
	}
	for _, s := range cases {
		if s.busy {
			for range held {
				receive(t, "a message", s.begun)
			}
		}
	}
	for _, s := range cases {
		s.ledger.fault(s.proxy.Addr(), held+1)
		s.breakIt(t, s.proxy)
		began := time.Now()
		s.c.Stop()
		go func() {
			<-s.c.StopChan
			s.took <- time.Since(began)
		}()
		close(s.answer)
	}
	for _, s := range cases {
		took := receive(t, "the end: "+s.name, s.took)
		limit := stopLimit + slack
		if !s.busy {
			limit = 100*time.Millisecond + slack
		}
		require.Less(t, took, limit, s.name)
		if s.busy && s.answers {
			stats := channelStats(t, s.nsqd)
			require.Zero(t, stats.InFlight, s.name)
			require.EqualValues(t, more, stats.Depth, s.name)
		}
		require.NoError(t, s.proxy.Heal())
		s.proxy.Cut()
	}
	for _, s := range cases {
		eventually(t, "no connection is left: "+s.name, func() bool { return s.proxy.Conns() == 0 })
		startConsumer(t, newConfig(held), s.ledger.handler(nil), s.proxy.Addr())
	}
	for _, s := range cases {
		s.ledger.awaitAll()
		awaitDrained(t, s.nsqd)
		if s.answers {
			require.Zero(t, channelStats(t, s.nsqd).TimeoutCount, s.name)
		}
	}
}
