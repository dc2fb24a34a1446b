package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/rdyloop/nsq/nsqtest"
)

// The plan of faults is what each lane's source of random numbers says, one step after the other. The seed is all it takes to have it
// again; only the moments differ a little, as a step takes as long as it takes.

// lane is one sequence of steps.
type lane struct {
	*rand.Rand
	soak *soak
}

func (s *soak) runLane(ctx context.Context, name string, first, shortest, longest time.Duration, step func(ctx context.Context, r lane)) {
	r := lane{newSeededRand(s.seed, name), s}
	s.lanes.Go(func() {
		for pause := first; sleep(ctx, pause); pause = r.between(shortest, longest) {
			step(ctx, r)
		}
	})
}

func (r lane) between(shortest, longest time.Duration) time.Duration {
	return shortest + time.Duration(r.Int64N(int64(longest-shortest)))
}

func (r lane) direction() nsqtest.Direction {
	return []nsqtest.Direction{nsqtest.ToServer, nsqtest.ToClient, nsqtest.Both}[r.IntN(3)]
}

var directionNames = map[nsqtest.Direction]string{nsqtest.ToServer: "to nsqd", nsqtest.ToClient: "to consumers", nsqtest.Both: "both ways"}

// chance is a step and how often it comes.
type chance struct {
	weight int
	step   func(ctx context.Context, r lane, nsqd int)
}

var nsqdSteps = []chance{
	{3, cutLink(false)},
	{3, cutLink(true)},
	{4, cutInMidFrame},
	{2, stallLink(200*time.Millisecond, 1500*time.Millisecond)},
	{1, stallLink(2500*time.Millisecond, 4*time.Second)},
	{1, blackHole},
	{2, delayLink},
	{1, trickle},
	{1, halfClose},
	{1, silentLink},
	{1, refuseLink},
	{3, restart},
	{2, freeze(300*time.Millisecond, 1500*time.Millisecond)},
	{1, freeze(2500*time.Millisecond, 4*time.Second)},
}

// pick draws one of the steps.
func pick(r lane, steps []chance) func(ctx context.Context, r lane, nsqd int) {
	total := 0
	for _, c := range steps {
		total += c.weight
	}
	n := r.IntN(total)
	for _, c := range steps {
		if n -= c.weight; n < 0 {
			return c.step
		}
	}
	panic("not reached")
}

// linkFault does something to the link of an nsqd, for so long, and heals it.
func (r lane) linkFault(ctx context.Context, nsqd int, d time.Duration, what string, do func(p *nsqtest.Proxy)) {
	s := r.soak
	f := s.ledger.beginFault(nsqd, &fault{what: what})
	p := s.cluster.proxies[nsqd]
	do(p)
	sleep(ctx, d)
	if err := insist(p.Heal); err != nil {
		s.ledger.fail("healing a link: %v", err)
	}
	s.ledger.endFault(nsqd, f)
}

func cutLink(reset bool) func(context.Context, lane, int) {
	return func(ctx context.Context, r lane, nsqd int) {
		if reset {
			r.linkFault(ctx, nsqd, 0, "links reset", func(p *nsqtest.Proxy) { p.Reset() })
		} else {
			r.linkFault(ctx, nsqd, 0, "links cut", func(p *nsqtest.Proxy) { p.Cut() })
		}
	}
}

func cutInMidFrame(ctx context.Context, r lane, nsqd int) {
	dir, n := r.direction(), 1+r.Int64N(3000)
	r.linkFault(ctx, nsqd, r.between(100*time.Millisecond, time.Second), fmt.Sprintf("a link reset after %d bytes %s", n, directionNames[dir]),
		func(p *nsqtest.Proxy) { p.CutAfter(dir, n) })
}

func stallLink(shortest, longest time.Duration) func(context.Context, lane, int) {
	return func(ctx context.Context, r lane, nsqd int) {
		dir, d := r.direction(), r.between(shortest, longest)
		r.linkFault(ctx, nsqd, d, fmt.Sprintf("links stalled %s for %s", directionNames[dir], d), func(p *nsqtest.Proxy) { p.Stall(dir) })
	}
}

func blackHole(ctx context.Context, r lane, nsqd int) {
	dir, d := r.direction(), r.between(500*time.Millisecond, 4*time.Second)
	s := r.soak
	f := s.ledger.beginFault(nsqd, &fault{what: fmt.Sprintf("links swallow all %s for %s", directionNames[dir], d)})
	p := s.cluster.proxies[nsqd]
	p.BlackHole(dir)
	sleep(ctx, d)
	p.Cut() // the streams have gaps
	if err := insist(p.Heal); err != nil {
		s.ledger.fail("healing a link: %v", err)
	}
	s.ledger.endFault(nsqd, f)
}

func delayLink(ctx context.Context, r lane, nsqd int) {
	dir, d, latency := r.direction(), r.between(500*time.Millisecond, 3*time.Second), r.between(5*time.Millisecond, 250*time.Millisecond)
	r.linkFault(ctx, nsqd, d, fmt.Sprintf("links delayed by %s %s for %s", latency, directionNames[dir], d), func(p *nsqtest.Proxy) { p.Latency(dir, latency) })
}

func trickle(ctx context.Context, r lane, nsqd int) {
	dir, d, n := r.direction(), r.between(500*time.Millisecond, 2*time.Second), 1+r.IntN(100)
	r.linkFault(ctx, nsqd, d, fmt.Sprintf("links trickle %d bytes at a time %s for %s", n, directionNames[dir], d),
		func(p *nsqtest.Proxy) { p.Trickle(dir, n, time.Millisecond) })
}

func halfClose(ctx context.Context, r lane, nsqd int) {
	dir := r.direction()
	r.linkFault(ctx, nsqd, 0, "links half closed "+directionNames[dir], func(p *nsqtest.Proxy) { p.HalfClose(dir) })
}

func silentLink(ctx context.Context, r lane, nsqd int) {
	d := r.between(300*time.Millisecond, 4*time.Second)
	r.linkFault(ctx, nsqd, d, fmt.Sprintf("links cut, and new ones silent for %s", d), func(p *nsqtest.Proxy) {
		p.Silent()
		p.Cut()
	})
}

func refuseLink(ctx context.Context, r lane, nsqd int) {
	d := r.between(100*time.Millisecond, 2*time.Second)
	r.linkFault(ctx, nsqd, d, fmt.Sprintf("links cut, and new ones refused for %s", d), func(p *nsqtest.Proxy) {
		if err := p.Refuse(); err != nil {
			r.soak.ledger.fail("refusing links: %v", err)
		}
		p.Cut()
	})
}

func restart(ctx context.Context, r lane, nsqd int) {
	d := r.between(0, 1500*time.Millisecond)
	r.down(ctx, nsqd, d, &fault{what: fmt.Sprintf("restarted, down for %s", d), stop: true}, (*nsqtest.NSQDProcess).Stop)
}

// kill publishes much and ends nsqd before it can be handled.
func kill(ctx context.Context, r lane, nsqd int) {
	d := r.between(0, 1500*time.Millisecond)
	r.soak.publish(nsqd, 100+r.IntN(2000))
	r.down(ctx, nsqd, d, &fault{what: fmt.Sprintf("killed, down for %s", d), kill: true}, (*nsqtest.NSQDProcess).Kill)
}

func (r lane) down(ctx context.Context, nsqd int, d time.Duration, f *fault, end func(*nsqtest.NSQDProcess) error) {
	s := r.soak
	s.ledger.beginFault(nsqd, f)
	n := s.cluster.nsqds[nsqd]
	if err := end(n); err != nil {
		s.ledger.fail("ending nsqd %d: %v", nsqd, err)
	}
	s.ledger.ended(f)
	sleep(ctx, d)
	if err := insist(n.Restart); err != nil {
		s.ledger.fail("restarting nsqd %d: %v", nsqd, err)
	}
	s.ledger.endFault(nsqd, f)
}

func freeze(shortest, longest time.Duration) func(context.Context, lane, int) {
	return func(ctx context.Context, r lane, nsqd int) {
		s, d := r.soak, r.between(shortest, longest)
		f := s.ledger.beginFault(nsqd, &fault{what: fmt.Sprintf("frozen for %s", d)})
		n := s.cluster.nsqds[nsqd]
		if err := n.Freeze(); err != nil {
			s.ledger.fail("freezing nsqd %d: %v", nsqd, err)
		}
		sleep(ctx, d)
		if err := n.Thaw(); err != nil {
			s.ledger.fail("thawing nsqd %d: %v", nsqd, err)
		}
		s.ledger.endFault(nsqd, f)
	}
}

// troubleLookupds does something to one nsqlookupd or all, or to the links to them.
func troubleLookupds(ctx context.Context, r lane) {
	if r.IntN(2) == 0 {
		stopLookupds(ctx, r)
		return
	}
	s, d, which := r.soak, r.between(100*time.Millisecond, 4*time.Second), r.IntN(numLookupds+1)
	queries := s.cluster.queries[:]
	if which < numLookupds {
		queries = queries[which : which+1]
	}
	how, do := "stalled", func(p *nsqtest.Proxy) { p.Stall(nsqtest.Both) }
	switch r.IntN(4) {
	case 0:
		how, do = "silent and reset", func(p *nsqtest.Proxy) { p.Silent(); p.Reset() }
	case 1:
		how, do = "delayed", func(p *nsqtest.Proxy) { p.Latency(nsqtest.Both, d/4) }
	case 2:
		how, do = "reset after some bytes", func(p *nsqtest.Proxy) { p.CutAfter(nsqtest.ToClient, 300) }
	}
	s.ledger.tell("links to nsqlookupds %s for %s: %d of %d", how, d, len(queries), numLookupds)
	for _, p := range queries {
		do(p)
	}
	sleep(ctx, d)
	for _, p := range queries {
		if err := insist(p.Heal); err != nil {
			s.ledger.fail("healing a link: %v", err)
		}
	}
	s.ledger.tell("links to nsqlookupds are well")
}

// insist tries again for a while: tests of another package may have taken the port meanwhile, for a moment.
func insist(start func() error) error {
	for deadline := time.Now().Add(patience / 2); ; {
		err := start()
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// stopLookupds stops one nsqlookupd, or all, and has nsqds register again when they are back.
func stopLookupds(ctx context.Context, r lane) {
	s, d, which := r.soak, r.between(100*time.Millisecond, 3*time.Second), r.IntN(numLookupds+1)
	lookupds := s.cluster.lookupds[:]
	if which < numLookupds {
		lookupds = lookupds[which : which+1]
	}
	s.ledger.tell("nsqlookupds stopped for %s: %d of %d", d, len(lookupds), numLookupds)
	for _, l := range lookupds {
		if err := l.Stop(); err != nil {
			s.ledger.fail("stopping an nsqlookupd: %v", err)
		}
	}
	sleep(ctx, d)
	for _, l := range lookupds {
		if err := insist(l.Restart); err != nil {
			s.ledger.fail("restarting an nsqlookupd: %v", err)
		}
	}
	for _, n := range s.cluster.nsqds {
		_ = n.Announce() // one that is down registers when it comes up
	}
	s.ledger.tell("nsqlookupds are back")
}

// replaceConsumer ends a consumer, in order or not, and puts another in its place.
func replaceConsumer(_ context.Context, r lane) {
	s := r.soak
	i, killIt := r.IntN(len(s.consumers)), r.IntN(2) == 0
	c := s.consumers[i]
	if c.child != nil && killIt {
		s.ledger.tell("%s is killed", c.name())
		c.kill()
	} else {
		s.ledger.tell("%s is stopped", c.name())
		c.stop()
	}
	s.consumers[i] = s.newConsumer(i, r)
	s.ledger.tell("%s starts", s.consumers[i].name())
}
