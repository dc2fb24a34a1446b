package soak

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	duration = flag.Duration("soak", 0, "run for so long, in place of a number of messages")
	messages = flag.Int("soak.messages", defaultMessages, "how many messages")
	seedFlag = flag.Uint64("soak.seed", 0, "plan of the faults, as printed by an earlier run; 0: a new one")
	rate     = flag.Int("soak.rate", 2000, "messages per second, at most")
	verbose  = flag.Bool("soak.v", false, "show what the consumers log")
)

// patience ends a test that would hang.
const patience = time.Minute

func TestMain(m *testing.M) {
	if text, ok := os.LookupEnv(childEnv); ok {
		var cfg workerConfig
		err := json.Unmarshal([]byte(text), &cfg)
		if err == nil {
			err = runChild(cfg)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// soak is one run.
type soak struct {
	t       *testing.T
	seed    uint64
	dir     string
	ledger  *ledger
	cluster *cluster
	lanes   sync.WaitGroup

	// The lane of consumers owns them while it runs.
	consumers  []*consumer
	generation int
}

func newSoak(t *testing.T) *soak {
	if runtime.GOOS == "windows" {
		t.Skip("Windows can't freeze a process: nsqtest has no Freeze there")
	}
	s := &soak{t: t, seed: cmp.Or(*seedFlag, rand.Uint64()|1), dir: t.TempDir()}
	fmt.Printf("%s: -soak.seed=%d\n", t.Name(), s.seed)
	s.cluster = startCluster(t)
	s.ledger = newLedger(s.cluster.addrs())
	s.ledger.loud = true
	t.Cleanup(func() {
		for _, c := range s.consumers { // those that a failure has left
			if c != nil && c.child != nil {
				_ = c.child.cmd.Process.Kill()
			}
		}
	})
	return s
}

// run publishes while the lanes do their worst, then heals everything and waits until all is handled. Publishing goes on for the
// length, if there is one, or until a number is accepted, which takes the least time or more.
func (s *soak) run(number int, least, length time.Duration, lanes func(ctx context.Context)) {
	l := s.ledger
	r := lane{newSeededRand(s.seed, "start"), s}
	s.consumers = make([]*consumer, len(kinds))
	for kind := range kinds {
		s.consumers[kind] = s.newConsumer(kind, r)
	}

	start := time.Now()
	ctx, cancel := context.WithCancel(s.t.Context())
	defer cancel()
	perSecond := *rate
	if length == 0 { // few messages take some time too, or nothing would happen to them
		perSecond = min(perSecond, number/int(least.Seconds()))
	}
	p := &publisher{
		soak:  s,
		pause: time.Second * batchSize * numNSQDs / time.Duration(perSecond),
		until: func() bool {
			if length > 0 {
				return time.Since(start) >= length
			}
			return l.acceptedSoFar() >= number
		},
	}
	p.start(ctx)
	lanes(ctx)
	memory := s.watch(ctx)
	p.wg.Wait()
	cancel()
	s.lanes.Wait()
	published := time.Since(start)

	l.tell("all is published and healed")
	s.awaitDrained()
	l.tell("all is drained")
	fmt.Printf("%s: %d messages in %s, all of them handled after %s more\n", s.t.Name(), l.acceptedSoFar(),
		published.Round(time.Millisecond), (time.Since(start) - published).Round(time.Millisecond))
	memory.check(l)
}

// awaitDrained waits until every accepted number is handled, or nsqds don't have it any more.
func (s *soak) awaitDrained() {
	deadline := time.Now().Add(patience)
	quiet := 0
	for {
		drained, left := s.cluster.drained()
		missing := s.ledger.backlog()
		switch {
		case drained && missing == 0:
			return
		case drained:
			// What a handler has done may not have been read from its journal yet.
			if quiet++; quiet > 20 {
				return
			}
		default:
			quiet = 0
		}
		if time.Now().After(deadline) {
			s.ledger.fail("after %s %d messages are left; %s", patience, missing, left)
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// finish stops the consumers, checks the books, and fails the test if something is wrong.
func (s *soak) finish() {
	var wg sync.WaitGroup
	for _, c := range s.consumers {
		wg.Go(c.stop)
	}
	wg.Wait()
	s.consumers = nil
	s.ledger.conclude()
	fmt.Printf("%s: handled again: %v; lost by nsqd: %d; taps: %+v\n", s.t.Name(), s.ledger.causes, len(s.ledger.lost), s.ledger.tapped)
	if text := s.ledger.report(); text != "" {
		require.Fail(s.t, fmt.Sprintf("-soak.seed=%d", s.seed), text)
	}
}

// TestSoak is the ledger: see the package's page.
func TestSoak(t *testing.T) {
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	s := newSoak(t)
	s.run(*messages, 20*time.Second, *duration, func(ctx context.Context) {
		for i := range numNSQDs {
			first := time.Duration(i+1) * 400 * time.Millisecond
			s.runLane(ctx, fmt.Sprintf("nsqd %d", i), first, 200*time.Millisecond, 2500*time.Millisecond, func(ctx context.Context, r lane) {
				pick(r, nsqdSteps)(ctx, r, i)
			})
		}
		s.runLane(ctx, "nsqlookupds", time.Second, 500*time.Millisecond, 5*time.Second, troubleLookupds)
		s.runLane(ctx, "consumers", time.Second, 300*time.Millisecond, 2*time.Second, replaceConsumer)
	})
	ports := s.cluster.ports(t)
	s.finish()
	requireNothingLeft(t, ports)
	require.NoError(t, s.cluster.close())
	requireAsBefore(t, goroutines, files)
}

// TestKilledNSQD: what an nsqd has in memory dies with it. Nothing else is missing: neither of other nsqds, nor what it had a FIN for,
// nor what it has accepted since.
func TestKilledNSQD(t *testing.T) {
	s := newSoak(t)
	s.run(6000, 10*time.Second, 0, func(ctx context.Context) {
		s.runLane(ctx, "nsqd 0", time.Second, 500*time.Millisecond, 3*time.Second, func(ctx context.Context, r lane) { kill(ctx, r, 0) })
	})
	s.finish()
	require.NotEmpty(t, s.ledger.lost, "there was nothing in memory: the test shows nothing")
	for _, number := range s.ledger.lost {
		require.Zero(t, s.ledger.entry(number).nsqd)
	}
}
