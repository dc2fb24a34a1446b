package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/rdyloop/nsq/bench/internal/fleet"
)

// scaleOptions say how much is measured.
type scaleOptions struct {
	fleets   []int         // numbers of nsqds, ascending
	compared int           // the number that go-nsq connects to as well
	runs     int           // of each
	idle     time.Duration // how long CPU is measured while nothing happens
	heart    time.Duration // heartbeat interval, where heartbeats are measured
	turn     time.Duration // RDYTurnIdle, where turns are measured
	look     time.Duration // RDYRedistributeInterval, where the busy nsqd is measured
	quiet    time.Duration // without an RDY command, after which connecting is over
}

// usualScale is measured with shorter turns and looks than the defaults of 500 ms and 5 s: a round of a thousand nsqds takes 50 s with those.
var usualScale = scaleOptions{
	fleets:   []int{1, 10, 100, 500, 1000},
	compared: 500,
	idle:     1500 * time.Millisecond,
	heart:    time.Second, // the least that nsqd takes
	turn:     50 * time.Millisecond,
	look:     time.Second,
	quiet:    400 * time.Millisecond,
}

const (
	scaleMaxInFlight = 2500 // some for each nsqd
	turnsMaxInFlight = 10   // where turns are measured
)

// fleetRun is what one consumer did with one fleet. CPU times are those of its process; where they can't be measured they mean nothing.
type fleetRun struct {
	nsqds int

	ready      time.Duration // from the first connection to the last nsqd's first RDY
	connectCPU time.Duration
	rdys       int     // to connect
	bytes      float64 // of live heap and of stacks, for each connection
	goroutines float64 // for each connection
	idleCPU    float64 // share of a core, without heartbeats

	// The rest is measured with this library only.

	beatCPU  float64       // share of a core, with heartbeats
	busyRDY  int64         // what the busy nsqd gets by the rules
	busy     time.Duration // from its first message to that
	round    time.Duration // until each nsqd has had its turn; 0: there are no turns with so few
	roundCPU float64       // share of a core, in that time
	busyCPU  time.Duration // for each message, when all nsqds are busy and take turns
}

// fleetPair is a fleet and a consumer, each in a process of its own.
type fleetPair struct {
	fleet, client *child
	addrs         []string
	library       string
}

// withFleet starts both and stops them after f.
func withFleet(ctx context.Context, library string, nsqds int, f func(*fleetPair) error) (err error) {
	server, err := startChild(ctx, "scale-fleet")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.stop()) }()
	var started fleetAnswer
	if err := server.ask(fleetQuestion{Do: "start", NSQDs: nsqds}, &started); err != nil {
		return err
	}
	client, err := startChild(ctx, "scale-client")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.stop()) }()
	return f(&fleetPair{fleet: server, client: client, addrs: started.Addrs, library: library})
}

func (p *fleetPair) askFleet(q fleetQuestion) (a fleetAnswer, err error) {
	err = p.fleet.ask(q, &a)
	return a, err
}

func (p *fleetPair) askClient(do string) (a footprint, err error) {
	err = p.client.ask(fleetClientQuestion{Do: do}, &a)
	return a, err
}

// newConsumer makes the next consumer of the client process.
func (p *fleetPair) newConsumer(c consumerConfig) error {
	c.Library = p.library
	var a footprint
	return p.client.ask(fleetClientQuestion{Do: "new", Config: c, Addrs: p.addrs}, &a)
}

// stopConsumer also waits until the fleet has seen the end of all connections.
func (p *fleetPair) stopConsumer() error {
	_, err := p.askClient("stop")
	if err != nil {
		return err
	}
	_, err = p.askFleet(fleetQuestion{Do: "gone"})
	return err
}

// connect measures connecting, and what the connections take afterwards.
func (p *fleetPair) connect(run *fleetRun, o scaleOptions) error {
	if err := p.newConsumer(consumerConfig{MaxInFlight: scaleMaxInFlight, RDYRedistributeInterval: o.look}); err != nil {
		return err
	}
	before, err := p.askClient("memory")
	if err != nil {
		return err
	}
	began, err := p.askClient("connect")
	if err != nil {
		return err
	}
	ready, err := p.askFleet(fleetQuestion{Do: "ready", Quiet: o.quiet})
	if err != nil {
		return err
	}
	ended, err := p.askClient("cpu")
	if err != nil {
		return err
	}
	after, err := p.askClient("memory")
	if err != nil {
		return err
	}
	run.ready = ready.Took
	run.rdys = ready.Counts.RDYs
	run.connectCPU = ended.CPU - began.CPU
	run.bytes = float64(after.Bytes-before.Bytes) / float64(run.nsqds)
	run.goroutines = float64(after.Goroutines-before.Goroutines) / float64(run.nsqds)
	return nil
}

// idle measures the share of a core that is used while nothing happens but heartbeats.
func (p *fleetPair) idle(ctx context.Context, d time.Duration) (share float64, err error) {
	first, err := p.askFleet(fleetQuestion{Do: "count"})
	if err != nil {
		return 0, err
	}
	before, err := p.askClient("cpu")
	if err != nil {
		return 0, err
	}
	start := time.Now()
	if err := pause(ctx, d); err != nil {
		return 0, err
	}
	after, err := p.askClient("cpu")
	if err != nil {
		return 0, err
	}
	share = float64(after.CPU-before.CPU) / float64(time.Since(start))
	last, err := p.askFleet(fleetQuestion{Do: "count"})
	if err != nil {
		return 0, err
	}
	if rdys := last.Counts.RDYs - first.Counts.RDYs; rdys > 0 {
		return 0, fmt.Errorf("%d RDY commands while idle", rdys)
	}
	return share, nil
}

// busy has one of many idle nsqds become busy. By the rules each idle one keeps an RDY of 1, and it gets the rest.
func (p *fleetPair) busy(run *fleetRun) error {
	run.busyRDY = min(fleet.MaxRDY, scaleMaxInFlight-int64(run.nsqds-1))
	a, err := p.askFleet(fleetQuestion{Do: "busy", Index: run.nsqds / 2, Goal: run.busyRDY})
	run.busy = a.Took
	return err
}

// round measures how long it takes until each nsqd has had its turn when all are idle, and what messages take when all are busy.
func (p *fleetPair) round(ctx context.Context, run *fleetRun, o scaleOptions) error {
	if err := p.newConsumer(consumerConfig{MaxInFlight: turnsMaxInFlight, RDYTurnIdle: o.turn}); err != nil {
		return err
	}
	if _, err := p.askClient("connect"); err != nil {
		return err
	}
	if _, err := p.askFleet(fleetQuestion{Do: "connected"}); err != nil {
		return err
	}
	before, err := p.askClient("cpu")
	if err != nil {
		return err
	}
	last, err := p.askFleet(fleetQuestion{Do: "round"})
	if err != nil {
		return err
	}
	after, err := p.askClient("cpu")
	if err != nil {
		return err
	}
	run.round = last.Took
	run.roundCPU = float64(after.CPU-before.CPU) / float64(last.Took)
	if err := p.allBusy(ctx, run, o.idle); err != nil {
		return err
	}
	return p.stopConsumer()
}

// allBusy measures what a message takes while all nsqds have some and take turns.
func (p *fleetPair) allBusy(ctx context.Context, run *fleetRun, d time.Duration) error {
	first, err := p.askFleet(fleetQuestion{Do: "all busy"})
	if err != nil {
		return err
	}
	before, err := p.askClient("cpu")
	if err != nil {
		return err
	}
	if err := pause(ctx, d); err != nil {
		return err
	}
	after, err := p.askClient("cpu")
	if err != nil {
		return err
	}
	last, err := p.askFleet(fleetQuestion{Do: "idle"})
	if err != nil {
		return err
	}
	run.busyCPU = (after.CPU - before.CPU) / time.Duration(max(1, last.Counts.FINs-first.Counts.FINs))
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// heartbeats measures what they cost.
func (p *fleetPair) heartbeats(ctx context.Context, run *fleetRun, o scaleOptions) error {
	if err := p.newConsumer(consumerConfig{MaxInFlight: scaleMaxInFlight, HeartbeatInterval: o.heart}); err != nil {
		return err
	}
	if _, err := p.askClient("connect"); err != nil {
		return err
	}
	if _, err := p.askFleet(fleetQuestion{Do: "ready", Quiet: o.quiet}); err != nil {
		return err
	}
	var err error
	if run.beatCPU, err = p.idle(ctx, o.idle); err != nil {
		return err
	}
	return p.stopConsumer()
}

// runFleet measures one library with one fleet.
func runFleet(ctx context.Context, library string, nsqds int, o scaleOptions) (run fleetRun, err error) {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	run.nsqds = nsqds
	err = withFleet(ctx, library, nsqds, func(p *fleetPair) (err error) {
		if err := p.connect(&run, o); err != nil {
			return err
		}
		if run.idleCPU, err = p.idle(ctx, o.idle); err != nil {
			return err
		}
		if library != ours {
			return p.stopConsumer()
		}
		if err := p.busy(&run); err != nil {
			return err
		}
		if err := p.stopConsumer(); err != nil {
			return err
		}
		if err := p.heartbeats(ctx, &run, o); err != nil {
			return err
		}
		if nsqds <= turnsMaxInFlight {
			return nil // everybody has an RDY all the time
		}
		return p.round(ctx, &run, o)
	})
	return run, err
}

// scaleResult are all runs.
type scaleResult struct {
	ours  map[int][]fleetRun // by the number of nsqds
	goNSQ []fleetRun
}

// measureScale measures this library with each fleet, and go-nsq with one of them, in random order.
func measureScale(ctx context.Context, o scaleOptions, random *rand.Rand, log io.Writer) (*scaleResult, error) {
	type job struct {
		library string
		nsqds   int
	}
	var jobs []job
	for _, n := range o.fleets {
		jobs = append(jobs, job{ours, n})
		if n == o.compared {
			jobs = append(jobs, job{goNSQ, n})
		}
	}
	result := &scaleResult{ours: make(map[int][]fleetRun)}
	for round := range o.runs {
		fmt.Fprintf(log, "bench: scale: round %d of %d\n", round+1, o.runs)
		for _, i := range random.Perm(len(jobs)) {
			j := jobs[i]
			r, err := runFleet(ctx, j.library, j.nsqds, o)
			if err != nil {
				return nil, fmt.Errorf("%s with %d nsqds: %w", j.library, j.nsqds, err)
			}
			if j.library == ours {
				result.ours[j.nsqds] = append(result.ours[j.nsqds], r)
			} else {
				result.goNSQ = append(result.goNSQ, r)
			}
		}
	}
	return result, nil
}

// runScale measures fleets and prints the tables. It makes half of the runs, since they take long and most of what is shown is counted.
func runScale(ctx context.Context, o options, out io.Writer) (missed int, err error) {
	s := usualScale
	s.runs = (o.runs + 1) / 2
	s.idle = time.Duration(float64(s.idle) * o.scale)
	s.fleets = nil
	for _, n := range usualScale.fleets {
		if o.wants(fleetName(n)) {
			s.fleets = append(s.fleets, n)
		}
	}
	if len(s.fleets) == 0 {
		return 0, nil
	}
	result, err := measureScale(ctx, s, o.random(), o.log)
	if err != nil {
		return 0, err
	}
	return printScale(out, s, result)
}

func fleetName(nsqds int) string { return fmt.Sprintf("scale, %d nsqds", nsqds) }
