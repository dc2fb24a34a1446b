package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	gonsq "github.com/nsqio/go-nsq"
	"github.com/rdyloop/nsq/nsqtest"
)

// paceConfig is what a latency server is asked for secondly: to publish so many messages. It answers with the rate it came to.
type paceConfig struct {
	Messages  int
	PerSecond int
}

// latencyServerRole is a real nsqd and its publisher. To the first question, whose content does not matter, it answers with its address.
func latencyServerRole(ctx context.Context, p *parent) (err error) {
	var begin any
	if err := p.receive(&begin); err != nil {
		return err
	}
	server, err := nsqtest.NewNSQD(nsqtest.NSQDOptions{MemQueueSize: 1 << 20}) // nothing goes to disk
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	if err := server.CreateChannel(topic, channel); err != nil {
		return err
	}
	if err := p.send(server.TCPAddr()); err != nil {
		return err
	}
	var pace paceConfig
	if err := p.receive(&pace); err != nil {
		return err
	}
	rate, err := publish(ctx, server.TCPAddr(), pace)
	if err != nil {
		return err
	}
	if err := p.send(rate); err != nil {
		return err
	}
	return p.receive(&begin) // there is no third question: the consumer has all when this ends
}

// publish publishes messages evenly, one PUB each, and returns how many a second that were. Each says when its PUB began. If a PUB takes
// too long for the pace, or the system's timers are too coarse for it, those that are late follow one another.
func publish(ctx context.Context, addr string, pace paceConfig) (perSecond float64, err error) {
	producer, err := gonsq.NewProducer(addr, gonsq.NewConfig())
	if err != nil {
		return 0, err
	}
	defer producer.Stop()
	producer.SetLogger(nil, gonsq.LogLevelError)
	if err := producer.Ping(); err != nil { // connects
		return 0, err
	}
	interval := time.Second / time.Duration(pace.PerSecond)
	start := time.Now()
	for i := range pace.Messages {
		time.Sleep(time.Until(start.Add(time.Duration(i) * interval)))
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		text := body(latencyBody)
		// The clock of the system is the same in all processes.
		binary.BigEndian.PutUint64(text, uint64(time.Now().UnixNano()))
		if err := producer.Publish(topic, text); err != nil {
			return 0, err
		}
	}
	return float64(pace.Messages) / time.Since(start).Seconds(), nil
}

const latencyBody = 100 // bytes

// latencyClientConfig is what a latency client is asked for first: to subscribe. It answers with nothing when it has. The second
// question, whose content does not matter, comes when the last message was published; the answer are latencies.
type latencyClientConfig struct {
	Config consumerConfig
	Addr   string
	WarmUp int
	Count  int
}

// latencies are the times from PUB to the handler, in microseconds, and the CPU time for each message.
type latencies struct {
	P50, P90, P99, Max float64
	CPU                float64 // may be unknown
}

// latencyClientRole measures when messages reach its handlers.
func latencyClientRole(ctx context.Context, p *parent) error {
	var cfg latencyClientConfig
	if err := p.receive(&cfg); err != nil {
		return err
	}
	w := newStopwatch(cfg.WarmUp, cfg.Count)
	c, err := newConsumer(cfg.Config, w.message)
	if err != nil {
		return err
	}
	defer c.stop()
	if err := c.ConnectToNSQDs([]string{cfg.Addr}); err != nil {
		return err
	}
	if err := p.send(struct{}{}); err != nil {
		return err
	}
	var report struct{}
	if err := p.receive(&report); err != nil {
		return err
	}
	if err := w.wait(ctx); err != nil {
		return err
	}
	return p.send(w.latencies())
}

// stopwatch takes the latency of each message, and the CPU time of the measured ones.
type stopwatch struct {
	warmUp  int64
	times   []time.Duration // by the order of handling, with those that warm up
	begun   atomic.Int64
	ended   atomic.Int64
	done    chan struct{} // closed when all are there
	cpu     time.Duration // when warmUp messages had begun; read after done
	failure atomic.Pointer[error]
}

func newStopwatch(warmUp, count int) *stopwatch {
	return &stopwatch{warmUp: int64(warmUp), times: make([]time.Duration, warmUp+count), done: make(chan struct{})}
}

// message is called by handlers, first thing.
func (w *stopwatch) message(text []byte) error {
	now := time.Now()
	i := w.begun.Add(1) - 1
	if len(text) != latencyBody || i >= int64(len(w.times)) {
		err := fmt.Errorf("message %d of %d has %d bytes", i+1, len(w.times), len(text))
		w.failure.CompareAndSwap(nil, &err)
		return err
	}
	w.times[i] = now.Sub(time.Unix(0, int64(binary.BigEndian.Uint64(text))))
	if i == w.warmUp {
		w.cpu = processCPU()
	}
	if w.ended.Add(1) == int64(len(w.times)) {
		close(w.done)
	}
	return nil
}

// wait waits for the last message.
func (w *stopwatch) wait(ctx context.Context) error {
	select {
	case <-w.done:
	case <-time.After(stallTimeout):
		return fmt.Errorf("%d of %d messages handled, %s after the last was published", w.ended.Load(), len(w.times), stallTimeout)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := w.failure.Load(); err != nil {
		return *err
	}
	return nil
}

// latencies may be called once after wait.
func (w *stopwatch) latencies() latencies {
	measured := w.times[w.warmUp:]
	l := latencies{CPU: unknown}
	if cpu := processCPU(); cpu != unknown {
		l.CPU = float64(cpu-w.cpu) / float64(time.Microsecond) / float64(len(measured))
	}
	slices.Sort(measured)
	at := func(part float64) float64 {
		i := int(math.Ceil(part*float64(len(measured)))) - 1
		return float64(measured[i]) / float64(time.Microsecond)
	}
	l.P50, l.P90, l.P99, l.Max = at(0.5), at(0.9), at(0.99), at(1)
	return l
}
