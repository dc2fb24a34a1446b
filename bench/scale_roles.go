package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/rdyloop/nsq/bench/internal/fleet"
)

// fleetQuestion is what the parent asks the process with the fake nsqds.
type fleetQuestion struct {
	Do    string        // see askFleet
	NSQDs int           // how many there shall be; of the first question
	Index int           // of the nsqd that shall be busy
	Goal  int64         // its RDY in the end
	Quiet time.Duration // without an RDY command, after which no more are expected
}

// fleetAnswer is its answer, and how things stand then.
type fleetAnswer struct {
	Addrs  []string
	Took   time.Duration // what was waited for, see the methods of fleet.Fleet
	Counts fleet.Counts
}

// fleetWait bounds each wait for a consumer. The longest that goes well is the round of a thousand nsqds.
const fleetWait = time.Minute

var errFleetWait = fmt.Errorf("not within %s", fleetWait)

// fleetRole is a fleet of fake nsqds.
func fleetRole(ctx context.Context, p *parent) (err error) {
	var f *fleet.Fleet
	defer func() {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	for {
		var q fleetQuestion
		if err := p.receive(&q); err != nil {
			return err
		}
		if f == nil {
			if f, err = fleet.New(q.NSQDs); err != nil {
				return err
			}
		}
		answer, err := askFleet(ctx, f, q)
		if err != nil {
			return fmt.Errorf("%s: %w", q.Do, err)
		}
		if err := p.send(answer); err != nil {
			return err
		}
	}
}

func askFleet(ctx context.Context, f *fleet.Fleet, q fleetQuestion) (a fleetAnswer, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, fleetWait, errFleetWait)
	defer cancel()
	switch q.Do {
	case "start":
		a.Addrs = f.Addrs()
	case "count":
	case "ready": // all have had an RDY, and no more come
		if a.Took, err = f.Ready(ctx); err == nil {
			err = f.Quiet(ctx, q.Quiet)
		}
	case "connected":
		err = f.Connected(ctx)
	case "busy":
		a.Took, err = f.Busy(ctx, q.Index, q.Goal)
		f.Idle()
	case "all busy":
		f.AllBusy()
	case "idle":
		f.Idle()
	case "round":
		a.Took, err = f.Round(ctx)
	case "gone":
		err = f.Gone(ctx)
	default:
		err = errors.New("unknown question")
	}
	if err != nil {
		return fleetAnswer{}, err
	}
	a.Counts, err = f.Counts()
	return a, err
}

// fleetClientQuestion is what the parent asks the process with the consumer.
type fleetClientQuestion struct {
	Do     string         // see fleetClientRole
	Config consumerConfig // of a new one
	Addrs  []string       // of the nsqds that it will connect to
}

// footprint is what a process has used and what it holds.
type footprint struct {
	CPU        time.Duration // since it began; may be unknown
	Bytes      int64         // of live heap and of stacks
	Goroutines int
}

// fleetHandler takes a moment, so that the messages of a busy nsqd wait, without a load that would be measured.
func fleetHandler([]byte) error {
	time.Sleep(time.Millisecond)
	return nil
}

// fleetClientRole is a consumer of a fleet. After a question "stop" there may be another one, in the same process.
func fleetClientRole(_ context.Context, p *parent) error {
	var c consumer
	var addrs []string
	for {
		var q fleetClientQuestion
		if err := p.receive(&q); err != nil {
			return err
		}
		var answer footprint
		switch q.Do {
		case "new":
			var err error
			if c, err = newConsumer(q.Config, fleetHandler); err != nil {
				return err
			}
			addrs = q.Addrs
		case "connect":
			answer.CPU = processCPU()
			if err := c.ConnectToNSQDs(addrs); err != nil {
				return err
			}
		case "stop":
			c.stop()
		case "cpu":
			answer.CPU = processCPU()
		case "memory":
			answer = memoryFootprint()
		default:
			return fmt.Errorf("%s: unknown question", q.Do)
		}
		if err := p.send(answer); err != nil {
			return err
		}
	}
}

// memoryFootprint collects garbage first: twice, since what sync.Pool holds goes with the second time.
func memoryFootprint() footprint {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return footprint{Bytes: int64(m.HeapAlloc + m.StackInuse), Goroutines: runtime.NumGoroutine()}
}
